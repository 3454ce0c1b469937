"""Decoders of the sizes of Llama 3.1 and 3.2, without weights."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxlora.models.config import ModelConfig, Rope
from jaxlora.models.families.llama import Llama
from jaxlora.models.options import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linear_names, linear_path
from jaxlora.modules.slot_shape import SlotShape

LLAMA_8B = ModelConfig(
    family=Llama.FAMILY,
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=8192,
    rms_eps=1e-5,
    rope=Rope(theta=5e5),
    layer_windows=(None,) * 32,
)
LLAMA_1B = dataclasses.replace(
    LLAMA_8B,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    head_dim=64,
    tie_embeddings=True,
    layer_windows=(None,) * 16,
)
LLAMA_70B = dataclasses.replace(
    LLAMA_8B,
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_heads=64,
    layer_windows=(None,) * 80,
)


def decoder(
    config: ModelConfig, *, slots: SlotShape | None = None, **options: Any
) -> DecoderSpec:
    """All linears adapted, four slots of rank 16 unless others are given."""
    defaults = dict(
        dtype=jnp.dtype("bfloat16"), max_segment_tokens=1024, mean_segment_tokens=400
    )
    return DecoderSpec(
        config=config,
        options=DecoderOptions(**(defaults | options)),
        slots=slots or SlotShape(num_slots=4, rank=16),
        adapted=tuple(sorted(map(linear_path, linear_names(config)))),
    )


def with_layers(config: ModelConfig, num_layers: int) -> ModelConfig:
    """The same model with another number of layers."""
    windows = (None,) * num_layers
    return dataclasses.replace(config, num_layers=num_layers, layer_windows=windows)

"""Estimates leave the code of kernels out of traces, and count the same arrays."""

import contextlib

import jax.numpy as jnp

from jaxlora.hf.config import model_config
from jaxlora.hf.names import linear_names, linear_path
from jaxlora.memory import estimate, planned
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.multi_lora_linear import SlotShape
from jaxlora.pallas_kernels.device import planned_for
from tests import tiny

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def test_the_same_arrays_are_counted(monkeypatch):
    config = model_config(tiny.CONFIG | WIDE)
    spec = DecoderSpec(
        config=config,
        options=DecoderOptions(
            dtype=jnp.dtype("bfloat16"),
            implementation="mosaic",
            attention="cudnn",
            max_segment_tokens=64,
        ),
        slots=SlotShape(num_slots=2, rank=16, use_dropout=True),
        adapted=tuple(sorted(map(linear_path, linear_names(config)))),
    )
    with planned_for(planned.TRACED_ON):
        with_kernels = contextlib.nullcontext
        short = estimate._kept_bytes(spec, 256, 64)
        monkeypatch.setattr(estimate, "shapes_only", with_kernels)
        assert estimate._kept_bytes(spec, 256, 64) == short
        assert min(short) > 0

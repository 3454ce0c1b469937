"""The library's own layers, of the sizes of a program in plain JAX."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlora.data.pack import pack_microbatch
from jaxlora.models.config import ModelConfig
from jaxlora.models.forward import SlotKeys, run_stage, training_options
from jaxlora.models.options import DecoderOptions
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.registry import model_config
from jaxlora.models.slot_settings import settings_of_base
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linear_names, linear_path
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.profile.tokens import job_batch
from jaxlora.profile.training import random_base
from jaxlora.scheduler import Limits
from scripts.bench.fuse.programs import RANK, Program, Shape
from scripts.bench.shapes import LARGE, config_json

BLOCK_TOKENS = 64


def own_layers(shape: Shape) -> Program:
    """Returns the layers with one adapter on the same tokens.

    They draw their own masks: those of the plain program cannot be drawn in kernels.
    """
    spec = _spec(shape)
    adapters = {
        path: jax.random.normal(jax.random.key(i), like.shape, like.dtype) / 16
        for i, (path, like) in enumerate(spec.shapes(nnx.LoRAParam).items())
    }
    sizes = shape.sizes
    x = jax.random.normal(
        jax.random.key(40), (sizes.tokens, sizes.width), spec.options.dtype
    )
    settings = settings_of_base(spec.settings_shapes())
    settings["scaling"][:], settings["dropout"][:] = 2.0, shape.rate
    settings["rank"][:] = RANK
    zeros: Any = np.zeros(1, np.int32)

    def run(adapters, x, base, settings, batch, keys):
        return run_stage(spec, base, adapters, settings, batch, keys, x)

    base = random_base(spec.base_shapes())
    keys = SlotKeys(seed=zeros, step=zeros)
    return Program(
        name=shape.name,
        function=run,
        trained=adapters,
        others=(x, base, settings, _batch(shape), keys),
        options=training_options(spec),
    )


def _config(shape: Shape) -> ModelConfig:
    sizes = shape.sizes
    # The first and the last layer are those of other stages, with the embedding and
    # the head.
    fields = config_json(LARGE, shape.layers + 2) | {
        "hidden_size": sizes.width,
        "intermediate_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_width,
    }
    return model_config(fields)


def _spec(shape: Shape) -> DecoderSpec:
    config, on_gpu = _config(shape), jax.default_backend() == "gpu"
    options = DecoderOptions(
        dtype=jnp.dtype(jnp.bfloat16),
        implementation="mosaic" if on_gpu else "xla",
        attention="cudnn" if on_gpu else "xla",
        max_segment_tokens=shape.sizes.sequence,
        mean_segment_tokens=shape.sizes.sequence,
    )
    spec = DecoderSpec(
        config=config,
        options=options,
        slots=SlotShape(num_slots=1, rank=RANK, use_dropout=shape.rate > 0),
        adapted=tuple(sorted(map(linear_path, linear_names(config)))),
    )
    return spec.stage(1, 1 + shape.layers)


def _batch(shape: Shape) -> PackedBatch:
    sizes = shape.sizes
    lengths = [sizes.sequence] * (sizes.tokens // sizes.sequence)
    job = job_batch(0, lengths, 256, np.random.default_rng(0))
    limits = Limits(capacity=sizes.tokens, block_tokens=BLOCK_TOKENS)
    packed = pack_microbatch(tuple(job.to_schedule()), {0: job}, limits)
    # The layers read no targets.
    return dataclasses.replace(packed, loss_inputs={})

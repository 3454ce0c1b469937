"""What a training step is thought to need, against what the compiler says."""

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest

from jaxlora.adapters.slots import SlotTable
from jaxlora.hf.config import model_config
from jaxlora.hf.names import linear_names, linear_path
from jaxlora.models.decoder import DecoderOptions, Remat
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.multi_lora_linear import SlotShape
from jaxlora.scheduler import Limits
from jaxlora.train import memory
from jaxlora.train.memory import Footprint
from jaxlora.train.step import CompiledSteps
from tests.jaxlora.train import fused
from tests.tiny import CONFIG

FOOTPRINT = Footprint(base=1000, slots=400, fixed=600, per_token=10.0, passing=2.0)


def decoder(config_json: dict, **options: Any) -> DecoderSpec:
    """All linears adapted, two slots."""
    config = model_config(config_json)
    return DecoderSpec(
        config=config,
        options=DecoderOptions(**options),
        slots=SlotShape(num_slots=2, rank=8),
        adapted=tuple(sorted(map(linear_path, linear_names(config)))),
    )


def thought_and_needed(spec: DecoderSpec, num_tokens: int) -> tuple[float, float]:
    """Bytes of a training step."""
    limits = Limits(capacity=num_tokens, block_tokens=64)
    base = {k: jnp.zeros(s.shape, s.dtype) for k, s in spec.base_shapes().items()}
    steps = CompiledSteps(spec)
    table = SlotTable(spec, steps.write_slot)
    program = memory.compiled_step(spec, steps, base, table, limits)
    needed = memory.measured(spec, program, limits)
    assert needed is not None
    thought = memory.estimated(spec, 64)
    return thought.step(num_tokens), needed.step(num_tokens)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a GPU")
def test_a_step_on_a_cpu():
    shape = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 32}
    spec = decoder(
        CONFIG | shape,
        dtype=jnp.dtype("float32"),
        remat="mlp",
        max_segment_tokens=256,
        mean_segment_tokens=100,
    )
    thought, needed = thought_and_needed(spec, 1024)
    assert 0.7 * needed < thought < 1.4 * needed


@fused.only_where_it_runs
@pytest.mark.parametrize("remat", get_args(Remat))
@pytest.mark.parametrize("longest", [1024, 4096])
def test_a_step_on_a_gpu(remat, longest):
    """Where cuDNN's scratch is more than all else in a layer."""
    shape = {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_hidden_layers": 4,
    }
    spec = decoder(
        CONFIG | shape,
        dtype=jnp.dtype("bfloat16"),
        implementation="mosaic",
        attention="cudnn",
        remat=remat,
        max_segment_tokens=longest,
        mean_segment_tokens=400,
    )
    thought, needed = thought_and_needed(spec, 8192)
    assert 0.98 * needed < thought < 1.25 * needed


def test_the_worst_moment_counts():
    """The head's bytes and a layer's are not there at once."""
    assert FOOTPRINT.total(100) == 1000 + 400 + 1000 + 600
    assert FOOTPRINT.total(1000) == 1000 + 400 + 10000 + 2000
    assert FOOTPRINT.total(0) == 1000 + 400 + 600


@pytest.mark.parametrize("passing", [0.0, 2.0])
@pytest.mark.parametrize("num_bytes", [2001, 3400, 5555, 99999])
def test_the_most_that_fits(passing, num_bytes):
    footprint = dataclasses.replace(FOOTPRINT, passing=passing)
    tokens = footprint.fitting_tokens(num_bytes)
    assert footprint.total(tokens) <= num_bytes < footprint.total(tokens + 1)


def test_a_checkpoint_must_fit():
    large = dataclasses.replace(FOOTPRINT, slots=4000, fixed=0)
    assert large.total(0) == large.total(200) == 1000 + 4000 + 3000
    assert large.fitting_tokens(8000) == 250
    assert large.fitting_tokens(7999) == 0

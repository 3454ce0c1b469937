"""Memory of a run on a quantized base: scratch, and the choice of a second copy."""

import dataclasses

import jax.numpy as jnp
import pytest

from jaxlora.config import RunConfig
from jaxlora.costs.gpus import UNKNOWN_DEVICE
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.options import DecoderOptions
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.pallas_kernels import BACKENDS
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.plan.memory.estimate import scratch_bytes
from jaxlora.plan.memory.footprint import Footprint, num_bytes
from jaxlora.plan.mesh.choose import choose as choose_plan
from jaxlora.plan.mesh.machine import Machine
from tests import tiny
from tests.jaxlora.plan.made_up import search_of

WIDTH, FEATURES, LAYERS = 64, 128, 2
MODEL = model_config(
    tiny.CONFIG | {"hidden_size": WIDTH, "intermediate_size": FEATURES}
)
ONE_LAYER = WIDTH * (2 * WIDTH + 2 * WIDTH // 2 + 3 * FEATURES)
BOUNDS = Bounds(smallest=64, largest=64, unit=64, fixed=64)


def spec(name: str | None, **settings) -> DecoderSpec:
    base = None if name is None else BaseFormat.named(name, **settings)
    return DecoderSpec(
        config=MODEL,
        options=DecoderOptions(
            dtype=jnp.dtype("bfloat16"), base_format=base, max_segment_tokens=64
        ),
        slots=SlotShape(num_slots=1, rank=2),
        adapted=("layers.0.mlp.up_proj",),
    )


@pytest.fixture
def transposing(monkeypatch):
    """Makes the back end one whose fp8 products need the transpose."""
    entry = dataclasses.replace(BACKENDS["xla"], reads_transpose=True)
    monkeypatch.setitem(BACKENDS, "xla", entry)


def test_a_call_has_a_scratch_for_all_weights_that_share_its_input(transposing):
    gate_and_up = 2 * WIDTH * FEATURES
    assert scratch_bytes(spec(None)) == 0
    assert scratch_bytes(spec("nf4")) == scratch_bytes(spec("int8")) == 2 * gate_and_up
    assert scratch_bytes(spec("fp8")) == gate_and_up
    assert scratch_bytes(spec("fp8", weight_copies=2)) == 0
    assert scratch_bytes(spec("fp8", fp8_backward=False)) == 2 * gate_and_up
    kept = tuple(f"layers.{i}.mlp.up_proj" for i in range(LAYERS))
    assert scratch_bytes(spec("nf4", kept=kept)) == gate_and_up


@pytest.mark.parametrize("name", ["nf4", "fp8", "mxfp4"])
def test_all_experts_of_a_layer_are_dequantized_at_once(name):
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
    mixture = {**tiny.CONFIG, "model_type": "qwen3_moe", "hidden_size": WIDTH, **sizes}
    found = dataclasses.replace(spec(name), config=model_config(mixture), adapted=())
    assert scratch_bytes(found) == 2 * 6 * WIDTH * 192 * 2  # of gate and up
    path = "layers.0.mlp.experts.up_proj.kernel.values"
    size = 1 if name == "fp8" else 0.5  # bytes of a weight
    assert num_bytes(found.base_shapes()[path]) == size * 6 * WIDTH * 192


def test_the_scratch_is_needed_while_the_fixed_bytes_are_free():
    parts = {"base_bytes": 100, "adapter_bytes": 0, "bytes_per_token": 1.0}
    found = Footprint(
        fixed_bytes=50, transient_bytes_per_token=1.0, scratch_bytes=40, **parts
    )
    assert found.step_bytes(10) == 10 + 50
    assert found.step_bytes(20) == 20 + 60
    assert found.fitting_tokens(180) == 20
    assert found.total_bytes(20) == 180


def choose(limit: int) -> tuple[bool, str]:
    """Returns whether auto takes a second copy under a limit, and why."""
    memory = DeviceMemory(num_bytes=limit, source="a described device")
    jobs = [{"name": "a", "data": {"path": "a.jsonl"}}]
    config = RunConfig(model="m", jobs=jobs, microbatch_tokens=64)
    here = Machine(num_devices=1, speed=UNKNOWN_DEVICE, memory=memory)
    plan = choose_plan(search_of(config, spec("fp8"), BOUNDS, here))
    [note] = [note for note in plan.notes if "weight_copies" in note.text]
    base = plan.spec.options.base_format
    assert base is not None
    return base.options.stores_transpose, note.text


def test_auto_takes_a_second_copy_if_memory_allows(transposing):
    more = num_bytes(spec("fp8", weight_copies=2).base_shapes())
    assert more - num_bytes(spec("fp8").base_shapes()) == LAYERS * ONE_LAYER
    is_taken, log = choose(2**30)
    assert is_taken and "weight_copies: auto: 2, as" in log
    is_taken, log = choose(more)
    assert not is_taken and "would leave too little memory" in log


def test_auto_takes_one_copy_where_kernels_need_no_transpose():
    is_taken, log = choose(2**30)
    assert not is_taken and "in both passes" in log

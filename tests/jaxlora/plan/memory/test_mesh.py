"""The memory of each device of a mesh, by stages, shards and replicas."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxlora.config import RunConfig
from jaxlora.config.replicas_config import ReplicaShape
from jaxlora.costs.gpus import UNKNOWN_DEVICE
from jaxlora.errors import ConfigError
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.pallas_kernels.device import planned_for
from jaxlora.plan.memory import device_memory as device_module
from jaxlora.plan.memory import estimate as memory_estimate
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.memory.capacity import fit
from jaxlora.plan.memory.device_memory import DeviceMemory, device_memory
from jaxlora.plan.memory.estimate import (
    StepBytes,
    part_bytes,
    stage_estimated,
    step_bytes,
)
from jaxlora.plan.memory.footprint import (
    GAPS,
    StagePrograms,
    num_bytes,
    optimizer_bytes,
)
from jaxlora.plan.memory.planned import TRACED_ON
from jaxlora.plan.mesh.choose import choose
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.stages import (
    MeshFootprint,
    MeshStages,
    estimated_footprint,
    measured_footprint,
    resident_footprint,
)
from jaxlora.programs import key
from jaxlora.programs.kept import KeptPrograms
from jaxlora.programs.program import keep_programs
from jaxlora.scheduler import Limits
from tests.jaxlora.plan.made_up import search_of
from tests.llama import LLAMA_8B, LLAMA_70B, decoder

SMALL = dataclasses.replace(
    LLAMA_8B,
    vocab_size=4096,
    hidden_size=64,
    intermediate_size=256,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    layer_windows=(None,) * 8,
)
SPEC = decoder(SMALL, dtype=jnp.dtype("float32"), remat="layer")
# Layers keep the same arrays however many linears are adapted, and traces of two
# take half as long.
TWO_LINEARS = dataclasses.replace(
    SPEC,
    adapted=tuple(p for p in SPEC.adapted if p.endswith(("q_proj", "down_proj"))),
)
TOKENS = 8192  # of a microbatch, for which memory is estimated
BOUNDS = Bounds(smallest=1024, largest=16384, unit=256)


def config(**settings) -> RunConfig:
    job = {"name": "a", "data": {"path": "a.jsonl"}}
    return RunConfig(model="m", jobs=(job,), remat="layer", **settings)


def stages_of(spec: DecoderSpec, mesh: str, **settings) -> MeshStages:
    return MeshStages.of(config(mesh=mesh, **settings), spec)


def estimate(mesh: str, **settings) -> MeshFootprint:
    return estimated_footprint(stages_of(SPEC, mesh, **settings), 64, TOKENS)


def settle(run: RunConfig, spec: DecoderSpec, bounds: Bounds) -> RunConfig:
    """Chooses what is `auto` by an estimate."""
    available = device_module.device_memory(0)
    here = Machine(num_devices=4, speed=UNKNOWN_DEVICE, memory=available)
    return choose(search_of(run, spec, bounds, here, num_jobs=4)).config


@pytest.fixture
def have(monkeypatch):
    """Sets the memory that each device has for a run."""

    def set_to(num_bytes: int) -> None:
        found = DeviceMemory(num_bytes=num_bytes, source="a pretended device")
        monkeypatch.setattr(device_module, "device_memory", lambda *_: found)

    return set_to


@pytest.mark.parametrize(
    ("mesh", "in_flight", "kept", "waiting"),
    [
        ("fsdp=4", None, [1], [0]),
        ("stage=3", None, [3, 2, 1], [4, 5, 5]),
        ("stage=3", 5, [5, 3, 1], [4, 6, 6]),
    ],
)
def test_microbatches_in_flight(mesh, in_flight, kept, waiting):
    stages = stages_of(SPEC, mesh, pipeline_microbatches=in_flight)
    uses = [stages.use(number) for number in range(len(stages.specs))]
    assert [use.num_kept for use in uses] == kept
    assert [use.num_waiting for use in uses] == waiting


@pytest.mark.usefixtures("memory_by_formula")
def test_a_stage_holds_its_own_weights_and_activations():
    whole, (first, second) = estimate("fsdp=1").stages[0], estimate("stage=2").stages
    assert first.base_bytes + second.base_bytes == whole.base_bytes
    assert first.adapter_bytes + second.adapter_bytes == whole.adapter_bytes
    # Only the last stage computes logits; each has optimizer steps of its own.
    assert second.fixed_bytes == whole.fixed_bytes > 0
    stages = stages_of(SPEC, "stage=2")
    assert first.fixed_bytes == optimizer_bytes(stages.specs[0], stages.use(0))
    assert first.fixed_bytes < second.fixed_bytes
    more = estimate("stage=2", pipeline_microbatches=3).stages
    assert more[0].bytes_per_token > first.bytes_per_token
    assert more[0].base_bytes == first.base_bytes


@pytest.mark.parametrize("remat", ["none", "mlp", "layer"])
def test_arrays_that_two_programs_keep(remat):
    """The first input may need no gradient; the allocator leaves gaps."""
    found = StepBytes(
        kept_by_layer=1000.0,
        kept_at_ends=10.0,
        recomputed=0.0,
        transient=0.0,
        alone=0.0,
    )
    slots = SlotShape(num_slots=4, rank=16, use_dropout=False)  # keeps no masks
    spec = dataclasses.replace(SPEC, slots=slots)
    stages = stages_of(spec, "stage=3").with_remat(remat)
    hidden, gaps = 64 * SPEC.options.dtype.itemsize, 1 + GAPS
    kept = []
    for number, spec in enumerate(stages.specs):
        use = stages.use(number)
        part = stage_estimated(spec, found, use)
        kept.append((part.bytes_per_token - use.num_waiting * hidden) / use.num_kept)
    first, middle, last = (len(spec.layer_numbers) for spec in stages.specs)
    unused = 0 if remat == "layer" else hidden
    assert kept == pytest.approx(
        [(1000 * first - unused) * gaps, 1000 * middle * gaps, 1000 * last + 10]
    )


def test_recomputed_arrays_and_gradients_that_peak_together():
    """At the gradient of the MLP's product; one layer of width 64 and 256."""
    size = SPEC.options.dtype.itemsize
    for remat in ("mlp", "layer"):
        found = step_bytes(TWO_LINEARS.with_remat(remat), 16, None)
        assert found.transient == 256 * size
        assert found.alone >= (256 + 64) * size
    none = step_bytes(TWO_LINEARS.with_remat("none"), 16, None)
    assert none.transient == (256 + 3 * 64) * size


def test_an_estimate_is_kept_for_the_next_process(tmp_path, monkeypatch):
    """For each decoder, capacity and device that is planned for."""
    monkeypatch.setattr(key, "_IMPORTED", 2**63)  # also if a file is new
    key.source_stamp.cache_clear()
    keep_programs(KeptPrograms(folder=tmp_path / "programs"))
    try:
        found = step_bytes(TWO_LINEARS, 16, 64)
        monkeypatch.setattr(memory_estimate, "_step_bytes", None)
        assert step_bytes(TWO_LINEARS, 16, 64) == found
        with pytest.raises(TypeError):
            step_bytes(TWO_LINEARS, 16, 128)
        with pytest.raises(TypeError), planned_for(TRACED_ON):
            step_bytes(TWO_LINEARS, 16, 64)
    finally:
        keep_programs(None)
        key.source_stamp.cache_clear()


def test_a_tied_embedding_is_on_both_ends():
    tied = decoder(dataclasses.replace(SMALL, tie_embeddings=True))
    [whole] = resident_footprint(stages_of(tied, "fsdp=1")).stages
    parts = resident_footprint(stages_of(tied, "stage=2")).stages
    embedding = 4096 * 64 * 2
    assert sum(part.base_bytes for part in parts) == whole.base_bytes + embedding


@pytest.mark.usefixtures("memory_by_formula")
def test_shards_are_gathered_two_layers_at_a_time():
    [whole], [shard] = (estimate(mesh).stages for mesh in ("fsdp=1", "fsdp=4"))
    layer = 64 * (64 + 32 + 32 + 64 + 3 * 256) * 4
    norms = (2 * 8 + 1) * 64 * 4
    assert shard.base_bytes == norms + (whole.base_bytes - norms) // 4
    assert shard.gathered_bytes == 2 * layer
    assert whole.gathered_bytes == 0
    # The head is gathered for the loss, beside one layer; each device has all slots.
    assert shard.fixed_bytes == whole.fixed_bytes + 4096 * 64 * 4 - layer
    assert shard.adapter_bytes == whole.adapter_bytes
    needed = shard.resident_bytes + shard.gathered_bytes + shard.step_bytes(1024)
    assert shard.total_bytes(1024) == pytest.approx(needed, abs=1)
    tokens = shard.fitting_tokens(10**9)
    assert shard.total_bytes(tokens) <= 10**9 < shard.total_bytes(tokens + 1)


@pytest.mark.usefixtures("memory_by_formula")
def test_each_replica_has_all_slots():
    [replica] = estimate("data=4").stages
    [single] = estimate("fsdp=1").stages
    assert replica.base_bytes == single.base_bytes
    assert replica.adapter_bytes == single.adapter_bytes
    assert replica.fixed_bytes == single.fixed_bytes


@pytest.mark.usefixtures("memory_by_formula")
@pytest.mark.parametrize("tensor", [2, 4])
def test_devices_that_share_microbatches_hold_parts(tensor):
    """With four devices, two share each of the key-value heads, and have both."""
    [whole], [part] = (estimate(f"tensor={n}").stages for n in (1, tensor))
    norms, kv = (2 * 8 + 1) * 64 * 4, 8 * 2 * 64 * 32 * 4
    shared = kv if tensor == 4 else 0
    rest = whole.base_bytes - norms - shared
    assert part.base_bytes == norms + shared + rest // tensor
    # A of linears that read the hidden states is whole, and B of those that write them.
    assert SPEC.slots is not None
    each = 8 * 4 * 4 * SPEC.slots.num_slots * SPEC.slots.rank  # weights, moments, ...
    features = 5 * 64 + 2 * 64 + (64 + 2 * 32 + 64 + 3 * 256) // tensor
    features += 2 * (32 - 32 // tensor) * bool(shared)
    assert part.adapter_bytes == each * features
    assert part.bytes_per_token < whole.bytes_per_token
    assert part.transient_bytes_per_token < whole.transient_bytes_per_token


@pytest.mark.parametrize(
    "remat, whole", [pytest.param("layer", 0, marks=pytest.mark.grid), ("none", 2)]
)
def test_devices_that_share_microbatches_keep_parts_of_the_rows(remat, whole):
    """The inputs of both norms; and all normalized rows, which linears take."""
    found = [part_bytes(TWO_LINEARS.with_remat(remat), n, 16, None) for n in (2, 4)]
    two, four = (one.kept_by_layer for one in found)
    hidden = 64 * 4
    divided = 1 if remat == "layer" else 2
    if remat == "none":  # q, the output of attention, and three arrays of the MLP
        divided += (64 + 64 + 3 * 256) / 64
    # The four devices have one of two key-value heads each, as the two have.
    assert two - four == pytest.approx(divided * hidden / 4, rel=0.1)
    assert four >= hidden * (whole + divided / 4)


@pytest.mark.parametrize("data", [2, 8, 64])
def test_the_sum_of_gradients_takes_no_more_on_more_devices(data, monkeypatch):
    """Two copies of a slot; a slot is a fourth of a copy of all of them."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    slots = num_bytes(SPEC.adapter_shapes())
    use = lambda mesh: stages_of(SPEC, mesh).use(0)
    assert optimizer_bytes(SPEC, use(f"data={data}")) == slots // 2
    assert optimizer_bytes(SPEC, use("fsdp=1")) == 0
    further = stages_of(SPEC, "fsdp=1").further_spec(ReplicaShape(tokens=256))
    assert optimizer_bytes(further, use("fsdp=1")) == 0  # it takes no steps


def test_llama_70b_fits_four_devices():
    """It has 131 GiB of weights, and a device 139."""
    spec = decoder(LLAMA_70B)
    one, four = (
        resident_footprint(stages_of(spec, mesh)).total_bytes(0) / 2**30
        for mesh in ("fsdp=1", "stage=2,fsdp=2")
    )
    assert one > 139
    assert 32 < four < 60


@pytest.mark.usefixtures("memory_by_formula")
def test_a_pipeline_takes_the_most_that_fits_its_tightest_stage(have):
    """The first stage has more in flight, so it has the least room.

    5 % stay free for the error of the estimate.
    """
    found = estimate("stage=2", pipeline_microbatches=4)
    limit = found.total_bytes(5000)
    assert found.tightest(5000) == 0
    have(math.ceil(limit / 0.95))
    run = config(mesh="stage=2", pipeline_microbatches=4, microbatch_tokens="auto")
    # Attention's gradient is compiled for every number of tokens that is tried.
    settled = settle(run, SPEC, dataclasses.replace(BOUNDS, largest=5632))
    assert settled.microbatch_tokens == 5000 // 256 * 256
    assert found.fitting_tokens(limit) in range(4999, 5002)  # bytes are rounded


@pytest.mark.usefixtures("memory_by_formula")
@pytest.mark.parametrize("tokens", [8704, "auto"])
def test_a_stage_that_does_not_fit_is_named(have, tokens):
    mesh = "stage=2,fsdp=2"
    settings = dict(mesh=mesh, pipeline_microbatches=4)
    found = estimate(**settings)
    fixed = None if tokens == "auto" else tokens
    # Few numbers are tried, as above.
    bounds = Bounds(smallest=8192, largest=8704, unit=256, fixed=fixed)
    run = config(**settings, microbatch_tokens=tokens)
    have(found.total_bytes(8192) - 1)
    match = (
        r"this run needs .* on each device of stage 1 of mesh stage=2,fsdp=2 \(layers 0"
        rf" to 3\) \(base .*, a training step of {fixed or 8192} tokens .*, and there"
        r" are .* \(a pretended device\)"
    )
    with pytest.raises(ConfigError, match=match):
        settle(run, SPEC, bounds)
    have(found.total_bytes(fixed or 8192))
    assert settle(run, SPEC, bounds).microbatch_tokens == fixed or 8192


# ---- what is compiled ----------------------------------------------------------------


def program(out: int, temp: int) -> Any:
    """A compiled program, as far as its memory goes."""
    memory = SimpleNamespace(
        output_size_in_bytes=out,
        alias_size_in_bytes=0,
        temp_size_in_bytes=temp,
        generated_code_size_in_bytes=0,
    )
    return mock.Mock(spec=jax.stages.Compiled, memory_analysis=lambda: memory)


def compiled(tokens: int, bytes_per_token: int) -> tuple[StagePrograms, ...]:
    """Two stages, of which the first keeps so much of each token."""
    hidden = tokens * 64 * 4
    kept = tokens * bytes_per_token
    backward = program(0, 10**6)
    first = StagePrograms(last=backward, forward=program(kept + hidden, 100))
    return first, StagePrograms(last=program(hidden, kept))


def test_the_first_stage_keeps_a_microbatch_for_each_in_flight():
    stages, limits = stages_of(SPEC, "stage=2"), Limits(capacity=1024, block_tokens=64)
    found = measured_footprint(stages, compiled(1024, 10_000), limits)
    assert found is not None
    first, second = found.stages
    kept, hidden = 1024 * 10_000, 1024 * 64 * 4
    batch = 6 * 1024 * 4 + 1024 // 64 * 4
    waiting = [stages.use(number).num_waiting * hidden for number in (0, 1)]
    # Both microbatches in the backward pass, and what the allocator wastes of them.
    needed = 2.05 * kept + 10**6 + waiting[0] + 3 * batch
    assert first.step_bytes(1024) == pytest.approx(needed, abs=1)
    needed = kept + hidden + waiting[1] + 2 * batch
    assert second.step_bytes(1024) == pytest.approx(needed, abs=1)


@pytest.mark.usefixtures("memory_by_formula")
def test_a_compiled_pipeline_has_the_last_word(have):
    """It needs more than estimated, so the capacity becomes smaller."""
    stages = stages_of(SPEC, "stage=2")
    tried = []

    def compile_stages(plan):
        tried.append(plan.config.microbatch_tokens)
        return compiled(plan.config.microbatch_tokens, 40_000)

    resident = resident_footprint(stages).total_bytes(0)
    have(resident + 3 * 4096 * 40_000)
    run = config(mesh="stage=2", microbatch_tokens=8192)
    here = Machine(num_devices=2, speed=UNKNOWN_DEVICE, memory=None)
    fixed = search_of(run, SPEC, BOUNDS, here).laid_out(run)
    plan = dataclasses.replace(fixed, bounds=BOUNDS)
    settled = fit(plan, compile_stages).config
    assert tried[0] == 8192 and tried[-1] == settled.microbatch_tokens
    limits = settled.limits
    found = measured_footprint(stages, compiled(limits.capacity, 40_000), limits)
    assert found is not None
    needed = found.total_bytes(limits.capacity)
    assert 0.85 < needed / (resident + 3 * 4096 * 40_000) <= 1
    with pytest.raises(ConfigError, match=r"on each device of stage 1 of mesh stage=2"):
        fit(fixed, compile_stages)


def test_weights_that_do_not_fit_name_the_mesh(have):
    [stage] = resident_footprint(stages_of(SPEC, "fsdp=2")).stages
    have(stage.base_bytes // 2)
    match = (
        r"on each device of mesh fsdp=2 \(base .* More devices, along fsdp, stage or"
    )
    with pytest.raises(ConfigError, match=match):
        settle(config(mesh="fsdp=2", microbatch_tokens=1024), SPEC, BOUNDS)


def test_simulated_devices_share_the_memory_of_the_machine():
    one = device_memory(0)
    assert one is not None and one.share(1) == one
    four = one.share(4)
    assert four.num_bytes == pytest.approx(one.num_bytes / 4, rel=1e-6)
    assert "an equal share for each of 4 devices" in four.source

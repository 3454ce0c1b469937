"""The mesh that is chosen for a described machine."""

import dataclasses
import itertools

import pytest

from jaxlora.config import RunConfig
from jaxlora.costs.gpus import UNKNOWN_DEVICE, find_speed
from jaxlora.errors import ConfigError
from jaxlora.families.model_config import ModelConfig
from jaxlora.plan.job.job_slots import JobPosition
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.plan.mesh.candidates import Candidates, Demand
from jaxlora.plan.mesh.choose import MeshChoice, choose_mesh
from jaxlora.plan.mesh.machine import Machine, this_machine
from jaxlora.sharding.mesh_sizes import MeshSizes
from tests.llama import LLAMA_8B, LLAMA_70B, decoder

SMALL = dataclasses.replace(
    LLAMA_8B,
    vocab_size=512,
    hidden_size=96,
    intermediate_size=256,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    layer_windows=(None,) * 4,
)


@pytest.fixture(scope="module", autouse=True)
def memory_of_runs():
    """Memory is estimated from traces, as for users."""


@pytest.fixture(autouse=True)
def _by_formula(request):
    """One test estimates memory from traces."""
    if request.function is not test_the_simulated_devices_of_this_machine:
        request.getfixturevalue("memory_by_formula")


def machine(num_devices: int, gib: float | None = 139, kind="NVIDIA H200") -> Machine:
    memory = None
    if gib is not None:
        memory = DeviceMemory(num_bytes=int(gib * 2**30), source="a described device")
    # The layers of `SMALL` stand for larger ones, whose products take all of the time.
    speed = dataclasses.replace(find_speed(kind), layer_seconds=0.0)
    return Machine(num_devices=num_devices, speed=speed, memory=memory)


def demand_of(num_jobs: int, batch_size: int, bounds: Bounds, lengths=(400,)) -> Demand:
    """Jobs with samples of these lengths, in turn."""
    samples = [lengths[i % len(lengths)] for i in range(batch_size)]
    return Demand(
        positions=[
            JobPosition(
                job=i,
                priority=0,
                slot=None,
                step=0,
                num_steps=20,
                batch_tokens=sum(samples),
            )
            for i in range(num_jobs)
        ],
        lengths=lambda job, step: samples,
        bounds=lambda _: bounds,
    )


def choose(
    model: ModelConfig,
    where: Machine,
    *,
    num_jobs: int = 4,
    batch_size: int = 64,
    tokens: int | None = 4096,
    length: int = 400,
    **settings,
) -> MeshChoice:
    """Chooses the mesh of jobs with samples of one length."""
    jobs = [
        {"name": f"job{i}", "data": {"path": "a.jsonl"}, "batch_size": batch_size}
        for i in range(num_jobs)
    ]
    config = RunConfig(
        model="m",
        jobs=jobs,
        mesh="auto",
        microbatch_tokens=tokens or "auto",
        **settings,
    )
    bounds = Bounds(smallest=1024, largest=8192, unit=256, fixed=tokens)
    demand = demand_of(num_jobs, batch_size, bounds, (length,))
    # Where memory is estimated from traces, they take twice as long with all linears.
    spec = decoder(model, remat=config.weakest_remat)
    some = [path for path in spec.adapted if path.endswith(("q_proj", "down_proj"))]
    spec = dataclasses.replace(spec, adapted=tuple(some))
    return choose_mesh(config, spec, demand, where)


def test_one_device():
    choice = choose(SMALL, machine(1))
    assert choice == MeshChoice(
        sizes=MeshSizes(), remat="none", reason="mesh auto: there is one device"
    )


def test_a_model_that_fits_one_device_is_replicated():
    choice = choose(LLAMA_8B, machine(2))
    assert choice.sizes == MeshSizes(data=2)
    assert choice.reason.startswith("mesh auto: data=2 on 2 devices: it needs ")
    assert "; predicted " in choice.reason and "x as fast as " in choice.reason


def test_devices_share_a_batch_of_a_single_sample():
    """Others would wait for it; where links are slow, its sums take longer.

    The memory is left out, as estimating it for each mesh takes most of the time.
    """
    alone = dict(num_jobs=1, batch_size=1, length=4096, remat="layer")
    where = machine(4, gib=None)
    choice = choose(LLAMA_8B, where, **alone)
    assert choice.sizes.tensor > 1 and choice.sizes.num_devices <= 4
    slow = dataclasses.replace(where.speed, link_bytes=4e9)
    where = dataclasses.replace(where, speed=slow)
    assert choose(LLAMA_8B, where, **alone).sizes.tensor == 1
    unknown = Machine(num_devices=4, speed=UNKNOWN_DEVICE, memory=None)
    assert choose(SMALL, unknown, **alone).sizes.tensor == 1


def test_llama_70b_is_divided():
    """Its weights alone need 131 GiB; replicas of it do not fit."""
    choice = choose(LLAMA_70B, machine(2), remat="layer")
    assert choice.sizes.num_devices == 2
    assert choice.sizes.stage * choice.sizes.fsdp >= 2
    assert "which has 139.00 GiB; predicted" in choice.reason


def test_remat_is_chosen_with_the_mesh():
    choice = choose(SMALL, machine(2), remat="auto")
    assert (choice.sizes, choice.remat) == (MeshSizes(data=2), "none")
    assert "data=2 with remat none on 2 devices" in choice.reason


def test_one_job_is_not_pipelined():
    """Its next batch waits for the last one, so most stages would be idle."""
    where = machine(4, gib=None)
    choice = choose(LLAMA_8B, where, num_jobs=1, batch_size=12, tokens=1024)
    assert choice.sizes.stage == 1


def test_slow_links_are_for_pipelines():
    """Over PCIe, gathering the weights takes longer than the work."""
    where = machine(4, 15, kind="NVIDIA L40S")
    choice = choose(LLAMA_8B, where, num_jobs=4, remat="layer", tokens=2048)
    assert choice.sizes.stage > 1
    assert choice.sizes.fsdp == 1


@pytest.mark.parametrize("tokens", [pytest.param(None, marks=pytest.mark.grid), 4096])
def test_devices_without_known_memory_and_speed(tokens):
    where = Machine(num_devices=4, speed=UNKNOWN_DEVICE, memory=None)
    choice = choose(SMALL, where, tokens=tokens)
    assert choice.sizes.num_devices == 4
    assert "on each device, of an unknown size" in choice.reason


@pytest.mark.needs_devices(8)
def test_the_simulated_devices_of_this_machine():
    where = this_machine()
    assert where.num_devices == 8 and where.memory is not None
    one_layer = dataclasses.replace(SMALL, num_layers=1, layer_windows=(None,))
    assert choose(one_layer, where, tokens=1024).sizes.num_devices == 8


def test_sizes_divide_the_model():
    """96 features are not divisible by 5, and 4 layers not into 5 stages."""
    only_replicas = choose(SMALL, machine(5), num_jobs=5)
    assert only_replicas.sizes == MeshSizes(data=5)
    assert only_replicas.reason.endswith(" as fast as data=2, the next best")


def test_devices_are_left_over_if_only_fewer_can_hold_the_run():
    """Five replicas do not fit, and neither five shards nor five stages are allowed."""
    settings = dict(remat="layer", tokens=2048, pipeline_microbatches=4)
    choice = choose(LLAMA_8B, machine(5, 16), **settings)
    assert choice.sizes.num_devices == 4
    assert " on 5 devices: it needs " in choice.reason


def test_the_window_of_a_pipeline_limits_its_stages():
    choice = choose(LLAMA_70B, machine(4), remat="layer", pipeline_microbatches=2)
    assert choice.sizes.stage <= 2


def test_several_capacities_of_a_mesh_are_compared():
    """The largest holds a batch and a half, and two batches are never in one tick."""
    bounds = Bounds(smallest=1024, largest=12288, unit=256)
    demand = demand_of(1, 16, bounds, lengths=(500,))
    config = RunConfig(
        model="m",
        jobs=({"name": "a", "data": {"path": "a.jsonl"}},),
        mesh="fsdp=2",
        microbatch_tokens="auto",
        remat="layer",
    )
    where = machine(2)
    candidates = Candidates(demand, where, where.memory)
    largest = candidates.largest(config, decoder(SMALL, remat="layer"))
    assert largest.tokens == 12288
    found, seconds = candidates.fastest(largest)
    assert found.tokens < largest.tokens and found.tokens % 256 == 0
    assert 1.5 * seconds < candidates.seconds_per_token(largest)
    assert seconds == candidates.seconds_per_token(found)
    given = dataclasses.replace(bounds, fixed=12288)
    alone = demand_of(1, 16, given, lengths=(500,))
    fixed = Candidates(alone, where, where.memory)
    assert fixed.fastest(fixed.largest(config, largest.stages.spec))[0].tokens == 12288


def test_no_mesh_and_capacity_is_predicted_to_be_faster():
    """No other one on 4 H200s is faster; memory is left out."""
    bounds = Bounds(smallest=1024, largest=5120, unit=1024)
    demand = demand_of(2, 16, bounds, lengths=(200, 360, 520, 680, 840, 1000))
    config = RunConfig(
        model="m",
        jobs=[{"name": name, "data": {"path": "a.jsonl"}} for name in "ab"],
        mesh="auto",
        microbatch_tokens="auto",
        remat="layer",
        window_steps=2,
    )
    spec, where = decoder(SMALL, remat="layer"), machine(4, gib=None)
    candidates = Candidates(demand, where, None)
    choice = choose_mesh(config, spec, demand, where)
    taken, seconds = candidates.fastest(
        candidates.largest(config.replace(mesh=str(choice.sizes)), spec)
    )
    meshes = [
        MeshSizes(data=data, stage=stage, fsdp=fsdp)
        for data, stage, fsdp in itertools.product((1, 2, 4), repeat=3)
        if data * stage * fsdp <= 4
    ]
    every = [
        candidates.at(config.replace(mesh=str(mesh), microbatch_tokens=t), spec, bounds)
        for mesh in meshes
        for t in range(bounds.smallest, bounds.largest + 1, bounds.unit)
    ]
    assert len(every) == 10 * 5
    best = min(map(candidates.seconds_per_token, every))
    assert best <= seconds <= 1.01 * best, f"{taken.stages.sizes}, {taken.tokens}"


@pytest.mark.parametrize(
    ("num_kv_heads", "chosen"),
    [
        pytest.param(2, MeshSizes(tensor=2), id="two share a sample"),
        pytest.param(3, MeshSizes(), id="heads that cannot be divided"),
    ],
)
def test_fewer_devices_are_taken_if_more_are_no_faster(num_kv_heads, chosen):
    """A batch of one sample runs on those that can share it; others would only wait."""
    model = dataclasses.replace(SMALL, num_kv_heads=num_kv_heads)
    choice = choose(model, machine(4), num_jobs=1, batch_size=1, tokens=1024)
    assert choice.sizes == chosen
    named = str(chosen) if chosen.num_devices > 1 else "fsdp=1"
    assert f"mesh auto: {named} on 4 devices" in choice.reason


def test_weights_are_gathered_inside_a_host():
    """Between two hosts it would take longer than the work."""
    two = dataclasses.replace(machine(4, 15), num_processes=2, num_hosts=2)
    settings = dict(num_jobs=4, remat="layer", tokens=2048)
    slow = choose(LLAMA_8B, two, network_gbits=10, **settings)
    assert (slow.sizes.data, slow.sizes.num_devices) == (2, 4)  # a replica on each
    # A network as fast as NVLink changes nothing.
    fast = choose(LLAMA_8B, two, network_gbits=1e6, **settings)
    one = dataclasses.replace(two, num_hosts=1)
    assert fast == choose(LLAMA_8B, one, **settings)


def test_room_is_left_for_the_error_of_the_estimate():
    """The whole memory would hold more tokens than are chosen."""
    bounds = Bounds(smallest=1024, largest=32768, unit=256)
    config = RunConfig(
        model="m",
        jobs=({"name": "a", "data": {"path": "a.jsonl"}},),
        mesh="stage=2",
        microbatch_tokens="auto",
        remat="layer",
    )
    where = machine(2, 14)
    candidates = Candidates(demand_of(4, 64, bounds), where, where.memory)
    found = candidates.largest(config, decoder(LLAMA_8B, remat="layer"))
    assert where.memory is not None
    assert 0.85 < found.needed_bytes / where.memory.num_bytes <= 0.95


def test_nothing_fits():
    match = (
        r"mesh auto: no mesh of 2 devices has the memory for this run, and \S+ comes "
        r"closest: this run needs .* on each device of .*there are 20.00 GiB \(a desc"
    )
    with pytest.raises(ConfigError, match=match):
        choose(LLAMA_70B, machine(2, 20), remat="layer")


def test_stages_do_not_span_processes():
    several = dataclasses.replace(machine(4), num_processes=2)
    assert choose(LLAMA_70B, several, remat="layer").sizes.stage == 1

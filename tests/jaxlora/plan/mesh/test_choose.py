"""The mesh that is chosen for a described machine."""

import dataclasses
import itertools

import pytest

from jaxlora.config import RunConfig
from jaxlora.costs.gpus import UNKNOWN_DEVICE, find_speed
from jaxlora.errors import ConfigError
from jaxlora.models.config import ModelConfig
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.plan.mesh.candidates import MARGIN, _hides_calls
from jaxlora.plan.mesh.choose import _meshes
from jaxlora.plan.mesh.choose import choose as choose_plan
from jaxlora.plan.mesh.machine import Machine, this_machine
from jaxlora.plan.run_plan import RunPlan
from jaxlora.sharding.mesh_sizes import MeshSizes
from tests.jaxlora.models.test_expert_parallel import spec_of
from tests.jaxlora.plan.made_up import search_of
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


def choose(
    model: ModelConfig,
    where: Machine,
    *,
    num_jobs: int = 4,
    batch_size: int = 64,
    tokens: int | None = 4096,
    length: int = 400,
    **settings,
) -> RunPlan:
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
    # Where memory is estimated from traces, they take twice as long with all linears.
    spec = decoder(model, remat=config.weakest_remat)
    some = [path for path in spec.adapted if path.endswith(("q_proj", "down_proj"))]
    spec = dataclasses.replace(spec, adapted=tuple(some))
    samples = [length] * batch_size
    given = dict(num_jobs=num_jobs, samples=samples)
    return choose_plan(search_of(config, spec, bounds, where, **given))


def sizes(plan: RunPlan) -> MeshSizes:
    return plan.stages.sizes


def reason(plan: RunPlan) -> str:
    """Why the mesh was chosen."""
    return plan.notes[0].text


def test_one_device():
    choice = choose(SMALL, machine(1))
    assert sizes(choice) == MeshSizes()
    assert reason(choice) == "mesh auto: there is one device"


def test_a_model_that_fits_one_device_is_replicated():
    choice = choose(LLAMA_8B, machine(2))
    assert sizes(choice) == MeshSizes(data=2)
    assert reason(choice).startswith("mesh auto: data=2 on 2 devices: it needs ")
    assert "; predicted " in reason(choice) and "x as fast as " in reason(choice)


def test_devices_share_a_batch_of_a_single_sample():
    """Others would wait for it; where links are slow, its sums take longer.

    The memory is left out, as estimating it for each mesh takes most of the time.
    """
    alone = dict(num_jobs=1, batch_size=1, length=4096, remat="layer")
    where = machine(4, gib=None)
    choice = choose(LLAMA_8B, where, **alone)
    assert sizes(choice).tensor > 1 and sizes(choice).num_devices <= 4
    slow = dataclasses.replace(where.speed, link_bytes=4e9)
    where = dataclasses.replace(where, speed=slow)
    assert sizes(choose(LLAMA_8B, where, **alone)).tensor == 1
    unknown = Machine(num_devices=4, speed=UNKNOWN_DEVICE, memory=None)
    assert sizes(choose(SMALL, unknown, **alone)).tensor == 1


def test_llama_70b_is_divided():
    """Its weights alone need 131 GiB; replicas of it do not fit."""
    choice = choose(LLAMA_70B, machine(2), remat="layer")
    assert sizes(choice).num_devices == 2
    assert sizes(choice).stage * sizes(choice).fsdp >= 2
    assert "which has 139.00 GiB; predicted" in reason(choice)


def test_remat_is_chosen_with_the_mesh():
    choice = choose(SMALL, machine(2), remat="auto")
    assert (sizes(choice), choice.config.remat) == (MeshSizes(data=2), "none")
    assert "data=2 with remat none on 2 devices" in reason(choice)


def test_one_job_is_not_pipelined():
    """Its next batch waits for the last one, so most stages would be idle."""
    where = machine(4, gib=None)
    choice = choose(LLAMA_8B, where, num_jobs=1, batch_size=12, tokens=1024)
    assert sizes(choice).stage == 1


def test_slow_links_are_for_pipelines():
    """Over PCIe, gathering the weights takes longer than the work."""
    where = machine(4, 15, kind="NVIDIA L40S")
    choice = choose(LLAMA_8B, where, num_jobs=4, remat="layer", tokens=2048)
    assert sizes(choice).stage > 1
    assert sizes(choice).fsdp == 1


@pytest.mark.parametrize("tokens", [pytest.param(None, marks=pytest.mark.grid), 4096])
def test_devices_without_known_memory_and_speed(tokens):
    where = Machine(num_devices=4, speed=UNKNOWN_DEVICE, memory=None)
    choice = choose(SMALL, where, tokens=tokens)
    assert sizes(choice).num_devices == 4
    assert "on each device, of an unknown size" in reason(choice)


@pytest.mark.needs_devices(8)
def test_the_simulated_devices_of_this_machine():
    where = this_machine()
    assert where.num_devices == 8 and where.memory is not None
    one_layer = dataclasses.replace(SMALL, num_layers=1, layer_windows=(None,))
    assert sizes(choose(one_layer, where, tokens=1024)).num_devices == 8


def test_sizes_divide_the_model():
    """96 features are not divisible by 5, and 4 layers not into 5 stages."""
    only_replicas = choose(SMALL, machine(5), num_jobs=5)
    assert sizes(only_replicas) == MeshSizes(data=5)
    assert reason(only_replicas).endswith(" as fast as data=2, the next best")


def test_experts_are_divided_where_links_are_known():
    """And in one way, with `expert` or with `tensor`."""
    config = RunConfig(
        model="m", jobs=[{"name": "a", "data": {"path": "a.jsonl"}}], mesh="auto"
    )
    bounds = Bounds(smallest=1024, largest=8192, unit=256, fixed=4096)

    def found(where: Machine) -> set[MeshSizes]:
        given = spec_of(), bounds, where
        return set(_meshes(search_of(config, *given, num_jobs=1, samples=[400]), 4))

    known = found(machine(4))
    assert known >= {MeshSizes(expert=4), MeshSizes(fsdp=2, expert=2)}
    assert all(one.expert == 1 or one.tensor == 1 for one in known)
    unknown = found(Machine(num_devices=4, speed=UNKNOWN_DEVICE, memory=None))
    assert unknown == {one for one in known if one.expert == one.tensor == 1}


def test_devices_are_left_over_if_only_fewer_can_hold_the_run():
    """Five replicas do not fit, and neither five shards nor five stages are allowed."""
    settings = dict(remat="layer", tokens=2048, pipeline_microbatches=4)
    choice = choose(LLAMA_8B, machine(5, 16), **settings)
    assert sizes(choice).num_devices == 4
    assert " on 5 devices: it needs " in reason(choice)


def test_the_window_of_a_pipeline_limits_its_stages():
    choice = choose(LLAMA_70B, machine(4), remat="layer", pipeline_microbatches=2)
    assert sizes(choice).stage <= 2


def test_several_capacities_of_a_mesh_are_compared():
    """The largest holds a batch and a half, and two batches are never in one tick."""
    bounds = Bounds(smallest=1024, largest=12288, unit=256)
    config = RunConfig(
        model="m",
        jobs=({"name": "a", "data": {"path": "a.jsonl"}},),
        mesh="fsdp=2",
        microbatch_tokens="auto",
        remat="layer",
    )
    given = config, decoder(SMALL, remat="layer"), bounds, machine(2)
    search = search_of(*given, samples=[500] * 16)
    found = search.best(config, MARGIN)
    largest = found.at(found.most)
    assert largest.tokens == 12288
    assert found.tokens < largest.tokens and found.tokens % 256 == 0
    assert 1.5 * found.seconds < largest.seconds
    fixed = dataclasses.replace(bounds, fixed=12288)
    alone = search_of(*given[:2], fixed, given[3], samples=[500] * 16)
    assert alone.best(config, MARGIN).tokens == 12288


def test_no_mesh_and_capacity_is_predicted_to_be_faster():
    """No other one on 4 H200s is faster; memory is left out."""
    bounds = Bounds(smallest=1024, largest=5120, unit=1024)
    config = RunConfig(
        model="m",
        jobs=[{"name": name, "data": {"path": "a.jsonl"}} for name in "ab"],
        mesh="auto",
        microbatch_tokens="auto",
        remat="layer",
        window_steps=2,
    )
    lengths = (200, 360, 520, 680, 840, 1000)
    samples = [lengths[i % len(lengths)] for i in range(16)]
    spec, where = decoder(SMALL, remat="layer"), machine(4, gib=10**6)
    search = search_of(config, spec, bounds, where, num_jobs=2, samples=samples)
    choice = choose_plan(search)
    meshes = [
        MeshSizes(data=data, stage=stage, fsdp=fsdp)
        for data, stage, fsdp in itertools.product((1, 2, 4), repeat=3)
        if data * stage * fsdp <= 4
    ]
    every = [
        search.unlimited(config.replace(mesh=str(mesh))).at(tokens)
        for mesh in meshes
        for tokens in range(bounds.smallest, bounds.largest + 1, bounds.unit)
    ]
    assert len(every) == 10 * 5
    best = min(one.seconds for one in every)
    assert best <= search.seconds(choice) <= 1.02 * best, choice.config.mesh


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
    assert sizes(choice) == chosen
    named = str(chosen) if chosen.num_devices > 1 else "fsdp=1"
    assert f"mesh auto: {named} on 4 devices" in reason(choice)


def test_weights_are_gathered_inside_a_host():
    """Between two hosts it would take longer than the work."""
    two = dataclasses.replace(machine(4, 15), num_processes=2, num_hosts=2)
    settings = dict(num_jobs=4, remat="layer", tokens=2048)
    slow = choose(LLAMA_8B, two, network_gbits=10, **settings)
    assert (sizes(slow).data, sizes(slow).num_devices) == (2, 4)  # a replica on each
    # A network as fast as NVLink changes nothing.
    fast = choose(LLAMA_8B, two, network_gbits=1e6, **settings)
    one = dataclasses.replace(two, num_hosts=1)
    other = choose(LLAMA_8B, one, **settings)
    assert (sizes(fast), reason(fast)) == (sizes(other), reason(other))


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
    spec, samples = decoder(LLAMA_8B, remat="layer"), [400] * 64
    search = search_of(config, spec, bounds, where, num_jobs=4, samples=samples)
    found = search.best(config, MARGIN)
    assert where.memory is not None
    assert 0.85 < found.at(found.most).needed_bytes / where.memory.num_bytes <= 0.95


def test_nothing_fits():
    match = (
        r"mesh auto: no mesh of 2 devices has the memory for this run, and \S+ comes "
        r"closest: this run needs .* on each device of .*there are 20.00 GiB \(a desc"
    )
    with pytest.raises(ConfigError, match=match):
        choose(LLAMA_70B, machine(2, 20), remat="layer")


def test_stages_do_not_span_processes():
    several = dataclasses.replace(machine(4), num_processes=2)
    assert sizes(choose(LLAMA_70B, several, remat="layer")).stage == 1


def test_long_samples_hide_the_calls_of_the_host():
    """With any attention, as all take longer; see `decoder_seconds`."""
    spec, here = decoder(SMALL), machine(1)
    sizes = range(20_000, 80_000, 4_000)

    def hidden(mean: float) -> list[bool]:
        bounds = [
            Bounds(smallest=n, largest=n, unit=n, sample_tokens=mean) for n in sizes
        ]
        return [_hides_calls(spec, one, here, MeshSizes()) for one in bounds]

    assert sum(hidden(8192.0)) > sum(hidden(64.0)) > 0

"""The predicted time of a run, and of its parts."""

import dataclasses

import pytest

from jaxlora.config import RunConfig
from jaxlora.costs.device_profile import estimate, model_digest
from jaxlora.costs.gpus import UNKNOWN_DEVICE, find_speed
from jaxlora.models.registry import model_config
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.plan.memory.footprint import num_bytes
from jaxlora.plan.mesh import predict
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.mesh.predict import window_seconds
from jaxlora.plan.stages import MeshStages
from jaxlora.scheduler import Lanes, Limits, Pipeline, Sample, Schedule, simulate
from scripts.bench.shapes import config_json
from tests.jaxlora.costs.test_device_profile import profile
from tests.jaxlora.plan.mesh.test_choose import SMALL
from tests.llama import LLAMA_8B, decoder

H100 = "NVIDIA H100 80GB HBM3"
SPEC = decoder(SMALL)
SLOTS = num_bytes(SPEC.adapter_shapes())
KIND = "NVIDIA H200"
LIMITS = Limits(capacity=1024, block_tokens=64)


def machine(**changes) -> Machine:
    speed = find_speed(KIND)
    mine = profile(SPEC, estimate=estimate(SPEC, speed), **changes)
    return Machine(num_devices=4, speed=speed, memory=None, profiles=(mine,))


def stages_of(mesh: str) -> tuple[MeshStages, Lanes]:
    config = RunConfig.model_construct(mesh=mesh, pipeline_microbatches=None)
    stages = MeshStages.of(config, SPEC, speed=find_speed(KIND))
    sizes = stages.sizes
    pipeline = Pipeline.one_f_one_b(sizes.stage, sizes.stage)
    return stages, Lanes(data=sizes.data, fsdp=sizes.fsdp, pipeline=pipeline)


def schedule_of(num_ticks: int, num_lanes: int = 1, jobs: int = 4) -> Schedule:
    """Each microbatch is a batch of a job, one after the other."""
    count = num_ticks * num_lanes
    return Schedule(
        microbatches=tuple(
            (Sample(owner=i % jobs, batch=i // jobs, index=0, num_tokens=900),)
            for i in range(count)
        ),
        limits=LIMITS,
    )


@pytest.mark.parametrize("shapes", [(), (320, 512)])
@pytest.mark.parametrize("mesh", ["data=1", "data=2", "fsdp=2"])
def test_without_stages_the_time_is_that_of_a_simulation(mesh, shapes):
    stages, lanes = stages_of(mesh)
    rates = machine().rates(SPEC, None)
    schedule = schedule_of(6, lanes.num_lanes)
    empty, n = ((),) * lanes.num_lanes, lanes.num_lanes
    given = schedule.microbatches[:-n]
    short = [(dataclasses.replace(m[0], num_tokens=300),) for m in given[: 2 * n]]
    schedule = dataclasses.replace(
        schedule, microbatches=(*short, *given[2 * n :], *empty)
    )
    own = {"squares": predict._mean_squares(schedule)}
    cost = predict.shape_seconds(stages, LIMITS.capacity, rates, shapes, **own)
    found = simulate(schedule, cost, lanes.pipeline, num_lanes=lanes.num_lanes)
    batches = {(s.owner, s.batch) for m in schedule.microbatches for s in m}
    steps = len(batches) * predict.exchange_seconds(stages, rates)
    # Each microbatch ends a batch here, and those of a tick step together.
    num_ticks = len([m for m in schedule.microbatches if m]) // n
    steps += num_ticks * predict.step_seconds(stages, rates)
    expected = found.makespan + steps
    predicted = window_seconds(stages, lanes, schedule, rates, shapes)
    assert predicted == pytest.approx(expected)


@pytest.mark.parametrize(("tensor", "share"), [(2, 0.87), (4, 0.70), (8, 0.50)])
def test_devices_that_share_microbatches_wait_for_their_sums(tensor, share):
    """By hand for 8,192 tokens on H200s: 0.80, 1.19 and 1.39 ms a layer and pass.

    The products take 11.1 ms divided by the devices. Nothing is hidden.
    """
    rates = Machine(num_devices=8, speed=find_speed(KIND), memory=None)
    spec = decoder(LLAMA_8B, attention="cudnn")
    rates = rates.rates(spec, None)
    config = RunConfig.model_construct(pipeline_microbatches=None)

    def seconds(mesh: str) -> float:
        own = config.model_copy(update={"mesh": mesh})
        stages = MeshStages.of(own, spec, speed=find_speed(KIND))
        (cost,) = predict.shape_seconds(stages, 8192, rates).stages
        return cost.forward(8192, 0) + cost.backward(8192, 0)

    per_gpu = seconds("data=1") / seconds(f"tensor={tensor}") / tensor
    assert per_gpu == pytest.approx(share, abs=0.06)


def test_what_an_adapter_adds_to_the_sums():
    """Rank 16 and 2,800 tokens: 2 %; half of the rank or twice the tokens: 1 %."""
    config = RunConfig.model_construct(pipeline_microbatches=None, mesh="tensor=2")
    for rank, tokens, share in ((16, 2800, 0.02), (16, 5600, 0.01), (8, 2800, 0.01)):
        slots = SlotShape(num_slots=4, rank=rank)
        spec = decoder(LLAMA_8B, slots=slots)
        stages = MeshStages.of(config, spec, speed=find_speed(KIND))
        found = predict.adapter_share(stages, tokens)
        assert found == pytest.approx(share, rel=0.03)


@pytest.mark.parametrize("mesh", ["data=1", "stage=2", "stage=4"])
def test_parts_add_up_to_the_whole(mesh):
    stages, lanes = stages_of(mesh)
    rates = machine(adapter_bytes=0).rates(SPEC, None)
    whole, part = schedule_of(240), schedule_of(24)
    once = window_seconds(stages, lanes, whole, rates)
    in_parts = 10 * window_seconds(stages, lanes, part, rates, is_part=True)
    assert in_parts == pytest.approx(once, rel=0.03)
    if mesh != "data=1":
        separate = 10 * window_seconds(stages, lanes, part, rates)
        assert separate > 1.02 * once  # they would fill and drain


def test_padding_takes_the_time_that_was_measured():
    stages, lanes = stages_of("data=1")
    rates = machine(padding=0.25, step_seconds=0.0, adapter_bytes=SLOTS).rates(
        SPEC, None
    )
    assert rates.profile is not None
    tokens = 960 + 0.25 * 64  # padded to blocks, and then to the capacity
    found = window_seconds(stages, lanes, schedule_of(10), rates)
    expected = 10 * rates.profile.cost(tokens, 900**2 * tokens / 1024)
    assert found == pytest.approx(expected)


def test_a_profile_takes_the_place_of_the_data_sheet():
    stages, lanes = stages_of("data=1")
    here = machine(step_seconds=0.0, adapter_bytes=SLOTS)
    rates = here.rates(SPEC, None)
    assert rates.profile is not None and rates.are_known
    found = window_seconds(stages, lanes, schedule_of(10), rates)
    assert found == pytest.approx(10 * rates.profile.cost(1024, 900**2))
    # A link that was measured is reached as it was.
    transfer = rates.speed.transfer_seconds(1e9)
    assert transfer == pytest.approx(1.0)
    other = dataclasses.replace(here, profiles=(profile(SPEC, model="another"),))
    sheet = dataclasses.replace(here, profiles=())
    times = [
        window_seconds(stages, lanes, schedule_of(10), m.rates(SPEC, None))
        for m in (other, sheet)
    ]
    assert times[0] == times[1] != found


def test_the_tables_of_many_slots_take_time_in_each_microbatch():
    """64 slots of rank 16 of SmolLM2-135M on an H100: 4.4 and 4.5 ms were measured."""
    config = model_config(config_json("smollm2-135m"))

    def stages(num_slots: int) -> MeshStages:
        spec = decoder(config, slots=SlotShape(num_slots=num_slots, rank=16))
        run = RunConfig.model_construct(mesh="data=1", pipeline_microbatches=None)
        return MeshStages.of(run, spec, speed=find_speed(H100))

    sheet = Machine(num_devices=1, speed=find_speed(H100), memory=None)
    many, one = stages(64), stages(1)
    rates = sheet.rates(many.spec, None)
    passes = predict.table_seconds(many, many.spec, rates)
    assert 1000 * passes == pytest.approx(4.0, rel=0.05)
    assert 1000 * predict.step_seconds(many, rates) == pytest.approx(4.6, rel=0.05)
    both = [predict.shape_seconds(s, 8192, rates).stages[0] for s in (one, many)]
    added = [cost.forward(8192, 0) + cost.backward(8192, 0) for cost in both]
    assert added[1] - added[0] == pytest.approx(passes * 63 / 64)
    # Twelve jobs that end a batch in the same microbatch step together.
    limits = Limits(capacity=8192, block_tokens=64)
    microbatch = tuple(
        Sample(owner=i, batch=0, index=0, num_tokens=640) for i in range(12)
    )
    schedule = Schedule(microbatches=(microbatch,), limits=limits)
    lanes = Lanes(data=1, fsdp=1, pipeline=Pipeline.one_f_one_b(1, 1))
    step = predict.step_seconds(many, rates)
    assert window_seconds(many, lanes, schedule, rates) == pytest.approx(
        added[1] + step, rel=1e-6
    )
    # A profile has the tables of its own slots, and the others are added.
    mine = profile(
        many.spec,
        estimate=estimate(many.spec, sheet.speed),
        adapter_bytes=num_bytes(one.spec.adapter_shapes()),
    )
    measured = dataclasses.replace(sheet, profiles=(mine,)).rates(many.spec, None)
    assert measured.profile is not None
    assert predict.table_seconds(one, one.spec, measured) == 0.0
    found = predict.table_seconds(many, many.spec, measured)
    assert found == pytest.approx(passes * 63 / 64)


def test_times_in_proportion_to_tokens_are_never_negative_without_them():
    """Rounding leaves -1e-20 of two equal times for some of these."""
    (stages, _), here = stages_of("data=1"), machine()
    fixed = {"base": 0.0, "per_square": 0.0}
    for n in range(1, 6):
        cost = here.profiles[0].cost.model_copy(update=fixed | {"per_token": n * 1e-7})
        mine = here.profiles[0].model_copy(update={"cost": cost})
        rates = dataclasses.replace(here, profiles=(mine,)).rates(SPEC, None)
        (found,) = predict.shape_seconds(stages, 2560, rates).stages
        assert found.forward.base == pytest.approx(0, abs=1e-15)


def test_a_profile_makes_an_unknown_device_known():
    mine = profile(SPEC, estimate=estimate(SPEC, UNKNOWN_DEVICE), link=None)
    unknown = Machine(num_devices=1, speed=UNKNOWN_DEVICE, memory=None)
    assert not unknown.rates(SPEC, None).are_known
    known = dataclasses.replace(unknown, profiles=(mine,))
    assert known.rates(SPEC, None).are_known
    assert mine.model == model_digest(SPEC)
    stages, lanes = stages_of("data=1")
    found = window_seconds(stages, lanes, schedule_of(3), known.rates(SPEC, None))
    assert found > 3 * mine.cost(1024, 900**2)  # and the steps

"""Tests packing into ticks of several lanes."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Limits,
    Pipeline,
    Schedule,
    get_packer,
    lower_bound,
    pack_ticks,
    simulate,
    violations,
)
from jaxlora.scheduler.check import require_legal
from jaxlora.scheduler.pack.fill import fill_ticks
from jaxlora.scheduler.pack.jobs import JobQueue, job_batches
from jaxlora.scheduler.pack.whole import arrange
from scripts.bench.mesh.fixed_ticks import fixed_shape_cost
from scripts.bench.scheduler.lengths import jobs
from tests.scheduler.strategies import LIMITS, mixes, sample

PACKERS = ("joint", "greedy", "lorafusion")


def pack(samples, lanes, limits=LIMITS, packer="joint") -> Schedule:
    cost = fixed_shape_cost(limits.capacity, lanes.pipeline.num_stages)
    return pack_ticks(samples, limits, packer, lanes, cost)


def stages(num: int, *, data: int = 1, fsdp: int = 1, **options) -> Lanes:
    pipeline = Pipeline.one_f_one_b(num)
    return Lanes(data=data, fsdp=fsdp, pipeline=pipeline, **options)


def num_ticks(samples, lanes, **options) -> int:
    return len(pack(samples, lanes, **options).microbatches) // lanes.num_lanes


def fewest_ticks(samples, lanes, limits) -> int:
    """No tick holds more than its capacity, nor two batches of one job."""
    tick = Limits(
        capacity=lanes.num_lanes * limits.capacity, block_tokens=limits.block_tokens
    )
    cost = fixed_shape_cost(tick.capacity, lanes.pipeline.num_stages)
    return lower_bound(samples, tick, lanes.pipeline, cost).microbatches


def batch(job, number, count, tokens):
    return [sample(job, number, i, tokens) for i in range(count)]


lanes_of_any_shape = st.builds(
    stages, st.sampled_from([1, 2, 4]), data=st.integers(1, 3), fsdp=st.integers(1, 3)
)


@settings(max_examples=20, deadline=None)
@given(mixes(), lanes_of_any_shape, st.sampled_from(PACKERS[:2]))
def test_ticks_are_legal(samples, lanes, packer):
    packed = pack(samples, lanes, packer=packer)
    require_legal(packed, samples, lanes)
    assert pack(samples, lanes, packer=packer) == packed


def test_lorafusion_packs_ticks():
    samples = jobs(["xsum"] * 3, num_samples=16, batch_size=4)
    limits = Limits(capacity=4096, block_tokens=64)
    lanes = stages(2, fsdp=2)
    require_legal(pack(samples, lanes, limits, "lorafusion"), samples, lanes)


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_one_lane_has_the_schedule_of_the_packer(packer, num_stages):
    samples = jobs(["xsum"] * 2, num_samples=12, batch_size=4)
    limits = Limits(capacity=4096, block_tokens=64)
    cost = fixed_shape_cost(limits.capacity, num_stages)
    wanted = get_packer(packer)(samples, limits, Pipeline.one_f_one_b(num_stages), cost)
    assert pack(samples, stages(num_stages), limits, packer) == wanted


@pytest.mark.parametrize(
    "name",
    [
        "mix",
        "heavy",
        *(pytest.param(n, marks=pytest.mark.grid) for n in ("xsum", "wikisum")),
    ],
)
@pytest.mark.parametrize("num_jobs, batch_size", [(1, 32), (4, 16), (8, 8), (16, 8)])
@pytest.mark.parametrize("lanes", [stages(1, fsdp=4), stages(2, data=2, fsdp=2)])
def test_lanes_are_about_as_full_as_possible(name, num_jobs, batch_size, lanes):
    limits = Limits(capacity=8192, block_tokens=64)
    samples = jobs([name] * num_jobs, num_samples=8 * batch_size, batch_size=batch_size)
    fewest = fewest_ticks(samples, lanes, limits)
    assert num_ticks(samples, lanes, limits=limits) <= 1.1 * fewest + 2


@settings(max_examples=12, deadline=None)
@given(mixes(max_jobs=4, max_samples=5), lanes_of_any_shape)
def test_ticks_never_take_longer_than_filled_one_by_one(samples, lanes):
    n, pipeline = lanes.num_lanes, lanes.pipeline
    token = AffineCost(base=30, per_token=1, per_square=0)
    cost = CostModel.uniform(pipeline.num_stages, forward=token, backward=token)
    time = lambda schedule: simulate(schedule, cost, pipeline, num_lanes=n).makespan
    queue = JobQueue.of(job_batches(samples), LIMITS, lanes, cost)
    filled = fill_ticks(queue, LIMITS, lanes)
    padded = [(*tick, *((),) * (n - len(tick))) for tick in filled]
    plain = Schedule(microbatches=tuple(itertools.chain(*padded)), limits=LIMITS)
    packed = pack_ticks(samples, LIMITS, "joint", lanes, cost)
    assert violations(packed, samples, distance=pipeline.distance, num_lanes=n) == []
    assert n == 1 or time(packed) <= time(plain) * (1 + 1e-9)


def test_tiny_batches_take_one_tick_a_round():
    samples = [
        s for job in range(8) for number in range(6) for s in batch(job, number, 2, 32)
    ]
    for packer in PACKERS[:2]:
        assert num_ticks(samples, stages(1, fsdp=4), packer=packer) == 6
    # With two stages, every other tick waits for the steps.
    assert num_ticks(samples, stages(2, fsdp=4)) == 11


def test_a_batch_of_five_microbatches_takes_two_ticks_of_four_lanes():
    one = [s for number in range(3) for s in batch(0, number, 5, 512)]
    assert num_ticks(one, stages(1, fsdp=4)) == 6
    # Two such jobs fill the lanes: 30 microbatches need 8 ticks.
    two = one + [s for number in range(3) for s in batch(1, number, 5, 512)]
    assert num_ticks(two, stages(1, fsdp=4)) == 8


def test_lanes_get_about_the_same_number_of_tokens():
    samples = jobs(["mix"] * 6, num_samples=64, batch_size=8)
    lanes = stages(1, fsdp=4)
    packed = pack(samples, lanes, Limits(capacity=8192, block_tokens=64))
    tokens = np.array([sum(s.num_tokens for s in m) for m in packed.microbatches])
    of_lane = tokens.reshape(-1, 4).sum(axis=0)
    assert of_lane.max() - of_lane.min() <= 8192  # one microbatch


def test_no_samples_make_no_ticks():
    for lanes in (stages(1), stages(2, fsdp=2), stages(1, data=2)):
        assert pack([], lanes).microbatches == ()


def test_finds_violations_of_ticks():
    first, second = batch(0, 0, 2, 100), batch(0, 1, 1, 100)

    def wrong(*microbatches, samples, distance=1):
        schedule = Schedule(microbatches=microbatches, limits=LIMITS)
        return violations(schedule, samples, distance=distance, num_lanes=2)

    one, two = tuple(first), tuple(second)
    everything = first + second
    assert not wrong(one, (), two, (), samples=everything)
    assert not wrong(*([s] for s in first), two, (), samples=everything)
    assert "mixes batches [0, 1] of job 0" in wrong(one, two, samples=everything)[0]
    late = wrong(two, (), one, (), samples=everything)
    assert "tick 1 holds batch 0 of job 0 after its batch 1" in late[0]
    near = wrong(one, (), two, (), samples=everything, distance=2)
    assert "starts in tick 1, 1 after the end of batch 0" in near[0]
    assert wrong(one, (), (), (), two, (), samples=everything) == ["tick 1 is empty."]
    with pytest.raises(ValueError, match="3, is not a multiple of num_lanes"):
        wrong(one, two, (), samples=everything)


def test_lanes_are_positive():
    for fields in ({"data": 0}, {"fsdp": 0}):
        with pytest.raises(ValueError, match="must be positive"):
            Lanes(**fields)


def test_the_start_of_the_longest_chain_comes_first():
    """A short job then fills the distance between two batches of a long one."""
    short = (sample(0, 0, 0, 1),)
    first, second = ((sample(1, batch, 0, 1),) for batch in (0, 1))
    found = arrange([short, first, second], num_lanes=1, distance=2)
    assert found == [[first], [short], [second]]

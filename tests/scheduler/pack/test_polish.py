"""Tests simulating variants of a schedule, polishing, and ramps."""

import dataclasses
import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    get_packer,
    joint,
    simulate,
    violations,
)
from jaxlora.scheduler.pack.fill import fill_ticks
from jaxlora.scheduler.pack.jobs import JobQueue, WorkModel, job_batches
from jaxlora.scheduler.pack.polish import Polish, first_largest
from jaxlora.scheduler.pack.ramps import Ramps
from jaxlora.scheduler.pack.segment import Segment
from jaxlora.scheduler.papers import mlora
from scripts.bench.scheduler.lengths import jobs
from tests.scheduler.strategies import LIMITS, costs, job_mixes, pipelines

FORWARD = AffineCost(base=256, per_token=1, per_square=2e-5)
BACKWARD = AffineCost(base=256, per_token=1, per_square=5e-5)


def cost_of(num_stages, **options):
    return CostModel.uniform(num_stages, forward=FORWARD, backward=BACKWARD, **options)


def filled(samples, limits, lanes, cost) -> Schedule:
    """Fills ticks without ramps, targets and polishing."""
    queue = JobQueue.of(job_batches(samples), limits, lanes, cost)
    n, found = lanes.num_lanes, fill_ticks(queue, limits, lanes)
    padded = [[*tick, *((),) * (n - len(tick))] for tick in found]
    return Schedule(microbatches=tuple(itertools.chain(*padded)), limits=limits)


def ticks(lengths):
    """Makes microbatches of one sample, or of none for a length of 0."""
    return tuple(
        (Sample(owner=0, batch=0, index=0, num_tokens=n),) if n else () for n in lengths
    )


def sizes(microbatches, cost):
    limits_free = dataclasses.replace(cost, buckets=())
    found = [limits_free.size(m, LIMITS) for m in microbatches]
    return np.array(found, float).reshape(-1, 2).T


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32), data=st.data())
def test_variants_have_the_makespans_of_the_simulator(seed, data):
    rng = np.random.default_rng(seed)
    num_stages = data.draw(st.sampled_from([1, 2, 3, 5]))
    in_flight = data.draw(st.sampled_from([None, num_stages + 1, 2 * num_stages - 1]))
    pipeline = Pipeline(num_stages=num_stages, in_flight=in_flight)
    cost = data.draw(costs(num_stages))
    cost = dataclasses.replace(
        cost, buckets=data.draw(st.sampled_from([(), (96, 512)]))
    )
    num = int(rng.integers(1, 16))
    first = int(rng.integers(0, num))
    last = int(rng.integers(first + 1, num + 1))
    draw = lambda n: ticks(rng.integers(1, 512, n) * (rng.random(n) < 0.7))
    whole = draw(num)
    variants = [whole[:first] + draw(last - first) + whole[last:] for _ in range(4)]
    segment = Segment(sizes(whole, cost), first, last, cost, pipeline)
    tried = np.stack([sizes(v[first:last], cost) for v in variants], axis=-1)
    wanted = [
        simulate(Schedule(microbatches=v, limits=LIMITS), cost, pipeline).makespan
        for v in variants
    ]
    assert segment.makespans(tried) == pytest.approx(wanted)
    assert (segment.makespans(tried, 50.0) >= np.array(wanted) - 1e-6).all()


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(
    samples=job_mixes(),
    num_stages=st.integers(2, 6),
    num_lanes=st.integers(1, 3),
    data=st.data(),
)
def test_polishing_keeps_every_rule_and_is_never_longer(
    samples, num_stages, num_lanes, data
):
    pipeline = Pipeline.one_f_one_b(num_stages)
    lanes = Lanes(data=num_lanes, pipeline=pipeline)
    cost = data.draw(costs(num_stages))
    plain = filled(samples, LIMITS, lanes, cost)
    time = lambda s: simulate(s, cost, pipeline, num_lanes=num_lanes).makespan
    work = WorkModel.from_cost(cost)
    places = [[work.item(s) for s in m] for m in plain.microbatches]
    places += [[]] * num_stages * num_lanes
    num = len(places) // num_lanes
    polish = Polish(places, {s.owner: 0 for s in samples}, LIMITS, lanes, cost)
    reported = [polish.run(0, num // 2), polish.run(num // 4, num)]
    found = tuple(
        tuple(sorted((i[2] for i in place), key=lambda s: (s.owner, s.index)))
        for place in polish.result()
    )
    better = Schedule(microbatches=found, limits=LIMITS)
    wrong = violations(better, samples, distance=num_stages, num_lanes=num_lanes)
    assert wrong == []
    # The slowest lane is that of both passes of the first stage together.
    assert time(better) >= reported[-1] * (1 - 1e-9)
    assert num_lanes > 1 or time(better) == pytest.approx(reported[-1])
    assert reported[0] >= reported[1] * (1 - 1e-9)
    assert num_lanes > 1 or time(plain) * (1 + 1e-9) >= reported[0]


@hypothesis.settings(max_examples=2, deadline=None)
@hypothesis.given(
    samples=job_mixes(),
    pipeline=pipelines(),
    num_lanes=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_plans_are_never_longer_than_filled_ones(samples, pipeline, num_lanes, data):
    cost, lanes = data.draw(costs(pipeline.num_stages)), num_lanes
    plain, default = (
        simulate(schedule, cost, pipeline, num_lanes=lanes).makespan
        for schedule in (
            filled(samples, LIMITS, Lanes(data=lanes, pipeline=pipeline), cost),
            joint.pack(samples, LIMITS, pipeline, cost, num_lanes=lanes),
        )
    )
    assert default <= plain * (1 + 1e-9)


@pytest.mark.parametrize("num_stages, most", [(4, 0.9), (8, 0.97)])
def test_a_job_that_runs_alone_gets_ramps(num_stages, most):
    limits = Limits(capacity=6144, block_tokens=64)
    pipeline, cost = Pipeline.one_f_one_b(num_stages), cost_of(num_stages)
    samples = jobs(["mix"], num_samples=48, batch_size=16)
    plain = filled(samples, limits, Lanes(pipeline=pipeline), cost)
    default = joint.pack(samples, limits, pipeline, cost)
    assert violations(default, samples, distance=num_stages) == []
    times = [simulate(s, cost, pipeline).makespan for s in (default, plain)]
    assert times[0] <= most * times[1]
    # Each batch starts and ends with smaller microbatches than it has in the middle.
    for _, batch in itertools.groupby(
        (m for m in default.microbatches if m), key=lambda m: m[0].batch
    ):
        tokens = [sum(s.num_tokens for s in m) for m in batch]
        assert max(tokens[0], tokens[-1]) < max(tokens)


def test_a_ramp_holds_every_item_once():
    cost, rng = cost_of(4), np.random.default_rng(0)
    ramps = Ramps(LIMITS, Pipeline.one_f_one_b(4), cost)
    work = WorkModel.from_cost(cost)
    for num in (1, 2, 9, 40):
        lengths = sorted(rng.integers(1, 512, num), reverse=True)
        items = [
            work.item(Sample(owner=0, batch=0, index=i, num_tokens=int(n)))
            for i, n in enumerate(lengths)
        ]
        split = ramps.split(items)
        assert sorted(itertools.chain(*split)) == list(range(num))
        assert split == Ramps(LIMITS, Pipeline.one_f_one_b(4), cost).split(items)
        for part in split:
            assert LIMITS.padded(sum(items[i][1] for i in part)) <= LIMITS.capacity


@pytest.mark.parametrize("num_stages", [1, 4, 8])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_joint_is_never_behind_mloras_order(num_stages, batch_size):
    limits = Limits(capacity=6144, block_tokens=64)
    pipeline, cost = Pipeline.one_f_one_b(num_stages), cost_of(num_stages)
    samples = jobs(["mix"] * 4, num_samples=16, batch_size=batch_size)
    ours = get_packer("joint")(samples, limits, pipeline, cost)
    theirs = mlora.pack(samples, limits, pipeline)
    times = [simulate(s, cost, pipeline).makespan for s in (ours, theirs)]
    assert times[0] <= times[1]


@pytest.mark.parametrize("num", [1, 7, 256, 5000, 9000])
def test_equal_exchanges_are_chosen_in_their_order(num):
    """On every processor, so that all processes of a run make the same plans."""
    values = np.round(np.random.default_rng(0).random(5000) * 20) - 2
    order = sorted(range(5000), key=lambda i: (-values[i], i))
    expected = [i for i in order if values[i] > 0][:num]
    assert first_largest(values, num).tolist() == expected

"""Tests that no legal schedule is below the bounds, and that some reach them."""

import dataclasses
import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    lower_bound,
    simulate,
    violations,
)
from tests.scheduler.strategies import costs

LIMITS = Limits(capacity=64, block_tokens=16)
PER_TOKEN = AffineCost(base=10, per_token=1, per_square=0)


def batches(*lengths, job=0):
    """Makes the batches of one job from tuples of lengths."""
    return [
        Sample(owner=job, batch=b, index=i, num_tokens=n)
        for b, batch in enumerate(lengths)
        for i, n in enumerate(batch)
    ]


def every_schedule(samples, num_slots):
    """Yields all placements of a handful of samples in slots."""
    for places in itertools.product(range(num_slots), repeat=len(samples)):
        slots = [[] for _ in range(num_slots)]
        for sample, place in zip(samples, places, strict=True):
            slots[place].append(sample)
        microbatches = tuple(tuple(s) for s in slots)
        yield Schedule(microbatches=microbatches, limits=LIMITS)


@pytest.mark.parametrize("buckets", [(), (64,), (32, 64)])
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(data=st.data())
def test_is_below_every_legal_schedule(buckets, data):
    num_stages = data.draw(st.integers(1, 3))
    pipeline = Pipeline.one_f_one_b(num_stages)
    padding = data.draw(st.sampled_from([1.0, 0.4]))
    drawn = data.draw(costs(num_stages))
    cost = dataclasses.replace(drawn, buckets=buckets, padding=padding)
    shape = data.draw(
        st.sampled_from([((2, 1),), ((3,),), ((1, 1), (1,)), ((2,), (2,))])
    )
    samples = [
        Sample(owner=j, batch=b, index=i, num_tokens=data.draw(st.integers(1, 64)))
        for j, sizes in enumerate(shape)
        for b, size in enumerate(sizes)
        for i in range(size)
    ]
    bound = lower_bound(samples, LIMITS, pipeline, cost)
    shortest, fewest = float("inf"), 99
    for schedule in every_schedule(samples, len(samples) + num_stages - 1):
        if not any(
            v
            for v in violations(schedule, samples, distance=pipeline.distance)
            if "is empty" not in v
        ):
            shortest = min(shortest, simulate(schedule, cost, pipeline).makespan)
            used = [i for i, m in enumerate(schedule.microbatches) if m]
            fewest = min(fewest, used[-1] - used[0] + 1)
    assert bound.makespan <= shortest * (1 + 1e-9)
    assert bound.microbatches <= fewest


def test_is_near_the_optimum_on_two_lanes():
    """The optimum of enumerated instances is never below the bound, and near it."""
    rng, ratios = np.random.default_rng(0), []
    for shape in (((2, 1),), ((3,),), ((1,), (1,), (1,)), ((2,), (1,))) * 2:
        num_stages = int(rng.integers(1, 3))
        pipeline = Pipeline.one_f_one_b(num_stages)
        token = AffineCost(base=float(rng.choice([0, 30])), per_token=1, per_square=0)
        cost = CostModel.uniform(num_stages, forward=token, backward=token)
        samples = [
            s
            for job, sizes in enumerate(shape)
            for s in batches(*(rng.integers(1, 64, n).tolist() for n in sizes), job=job)
        ]
        shortest = min(
            simulate(schedule, cost, pipeline, num_lanes=2).makespan
            for schedule in every_schedule(samples, 2 * (2 + num_stages))
            if not [
                v
                for v in violations(
                    schedule, samples, distance=pipeline.distance, num_lanes=2
                )
                if "is empty" not in v
            ]
        )
        bound = lower_bound(samples, LIMITS, pipeline, cost, num_lanes=2).makespan
        assert bound <= shortest * (1 + 1e-9)
        ratios.append(shortest / bound)
    assert np.mean(ratios) < 1.1


def test_large_samples_share_no_microbatch():
    samples = batches((33, 34, 35, 10), (40,)) + batches((31, 32), job=1)
    cost = CostModel.uniform(1, forward=PER_TOKEN, backward=PER_TOKEN)
    assert lower_bound(samples, LIMITS, Pipeline(), cost).microbatches == 5
    two = lower_bound(samples, LIMITS, Pipeline(), cost, num_lanes=2)
    assert two.microbatches == 3


def test_work_bound():
    """Five samples share no microbatch, and short ones come first and last."""
    samples = [s for job in range(5) for s in batches((60, 4), job=job)]
    cost = CostModel.uniform(3, forward=PER_TOKEN, backward=PER_TOKEN, communication=3)
    bound = lower_bound(samples, LIMITS, Pipeline.one_f_one_b(3), cost)
    work = 5 * 2 * (10 + 64) + 2 * 2 * (10 + 16)
    assert bound.work == work + 2 * (2 * (10 + 16) + 2 * 3)
    assert bound.microbatches == 5


def test_a_microbatch_costs_its_bucket():
    """A job of four short batches takes four full buckets."""
    samples = batches((33,), (33, 33)) + batches((40,), (1,), (1,), (1,), job=1)
    cost = CostModel.uniform(1, forward=PER_TOKEN, backward=PER_TOKEN, buckets=(64,))
    bound = lower_bound(samples, LIMITS, Pipeline(), cost)
    assert bound.microbatches == 4
    assert bound.makespan == 4 * 2 * (10 + 64)


def test_chain_bound_is_reached_by_single_samples():
    samples = batches((50,), (30,), (64,))
    cost = CostModel.uniform(4, forward=PER_TOKEN, backward=PER_TOKEN)
    pipeline = Pipeline.one_f_one_b(4)
    bound = lower_bound(samples, LIMITS, pipeline, cost)
    # The samples are padded to 64, 32 and 64 tokens.
    assert bound.chain == 4 * 2 * (30 + 64 + 32 + 64)
    apart = tuple(m for s in samples for m in ((s,), (), (), ()))[:-3]
    schedule = Schedule(microbatches=apart, limits=LIMITS)
    assert simulate(schedule, cost, pipeline).makespan == bound.makespan
    assert bound.microbatches == 9


def test_no_chain_bound_without_a_distance():
    samples = batches((50,), (30,))
    cost = CostModel.uniform(4, forward=PER_TOKEN, backward=PER_TOKEN)
    pipeline = Pipeline(num_stages=4, distance=1)
    assert lower_bound(samples, LIMITS, pipeline, cost).chain == 0


def test_gap():
    samples = batches((64,))
    cost = CostModel.uniform(1, forward=PER_TOKEN, backward=PER_TOKEN)
    bound = lower_bound(samples, LIMITS, Pipeline(), cost)
    assert bound.makespan == 148
    assert bound.gap(148 * 1.25) == pytest.approx(0.25)
    assert lower_bound([], LIMITS, Pipeline(), cost).gap(0) == 0

"""Tests the default packer: its schedules are legal, deterministic and short."""

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Limits,
    Pipeline,
    Sample,
    greedy,
    joint,
    lower_bound,
    padded_tokens,
    simulate,
    violations,
)
from scripts.bench.scheduler.lengths import jobs
from tests.scheduler.strategies import (
    LIMITS,
    costs,
    job_mixes,
    num_stale_batches,
    pipelines,
)

FORWARD = AffineCost(base=256, per_token=1, per_square=2e-5)
BACKWARD = AffineCost(base=256, per_token=1, per_square=5e-5)
COST = CostModel.uniform(4, forward=FORWARD, backward=BACKWARD)
PIPELINE = Pipeline.one_f_one_b(4)


@hypothesis.settings(max_examples=3, deadline=None)
@hypothesis.given(
    samples=job_mixes(max_batches=3), pipeline=pipelines(), data=st.data()
)
def test_keeps_every_rule(samples, pipeline, data):
    cost = data.draw(costs(pipeline.num_stages))
    schedule = joint.pack(samples, LIMITS, pipeline, cost)
    assert violations(schedule, samples, distance=pipeline.distance) == []
    assert schedule == joint.pack(samples[::-1], LIMITS, pipeline, cost)
    ran = simulate(schedule, cost, pipeline)
    assert num_stale_batches(schedule, pipeline, ran) == 0
    bound = lower_bound(samples, LIMITS, pipeline, cost)
    assert bound.makespan <= ran.makespan * (1 + 1e-9)
    assert bound.microbatches <= len(schedule.microbatches)


@hypothesis.settings(max_examples=3, deadline=None)
@hypothesis.given(samples=job_mixes(), pipeline=pipelines())
def test_fills_buckets(samples, pipeline):
    cost = CostModel.uniform(
        pipeline.num_stages, forward=FORWARD, backward=BACKWARD, buckets=(256, 512)
    )
    schedule = joint.pack(samples, LIMITS, pipeline, cost)
    assert violations(schedule, samples, distance=pipeline.distance) == []


@pytest.mark.parametrize("num_jobs", [1, 2, 3, 4, 8])
def test_bubbles_stay_small(num_jobs):
    """Jobs with a global batch of 16 run on four stages with 6144 tokens."""
    max_bubble = {1: 0.24, 2: 0.06, 3: 0.03, 4: 0.025, 8: 0.02}[num_jobs]
    limits = Limits(capacity=6144, block_tokens=64)
    samples = jobs(["mix"] * num_jobs, num_samples=160, batch_size=16)
    schedule = joint.pack(samples, limits, PIPELINE, COST)
    assert violations(schedule, samples, distance=4) == []
    assert simulate(schedule, COST, PIPELINE).bubble <= max_bubble


@pytest.mark.parametrize("num_stages", [1, 4, 8, 16])
def test_one_job_waits_for_each_of_its_steps(num_stages):
    """With one microbatch per batch, there are S - 1 no-ops between two batches."""
    samples = [
        Sample(owner=0, batch=b, index=0, num_tokens=LIMITS.capacity) for b in range(4)
    ]
    pipeline = Pipeline.one_f_one_b(num_stages)
    cost = CostModel.uniform(num_stages, forward=FORWARD, backward=BACKWARD)
    schedule = joint.pack(samples, LIMITS, pipeline, cost)
    full = [i for i, m in enumerate(schedule.microbatches) if m]
    assert full == [0, num_stages, 2 * num_stages, 3 * num_stages]
    assert len(schedule.microbatches) == full[-1] + 1


def test_keeps_the_tail_of_a_longer_job():
    samples = [
        Sample(owner=job, batch=b, index=i, num_tokens=100 + i)
        for job, num_batches in ((3, 1), (7, 9))
        for b in range(num_batches)
        for i in range(b % 3 + 1)
    ]
    schedule = joint.pack(samples, LIMITS, PIPELINE, COST)
    assert violations(schedule, samples, distance=4) == []


def test_batch_numbers_need_not_start_at_zero():
    samples = [Sample(owner=0, batch=b, index=0, num_tokens=9) for b in (5, 6, 9)]
    schedule = joint.pack(samples, LIMITS, PIPELINE, COST)
    assert violations(schedule, samples, distance=4) == []


def test_packs_nothing_from_nothing():
    assert joint.pack([], LIMITS, PIPELINE, COST).microbatches == ()


@pytest.mark.parametrize("batch", [0, 3])
def test_refuses_a_sample_over_the_capacity_before_planning(batch):
    samples = [Sample(owner=2, batch=b, index=0, num_tokens=9) for b in range(4)]
    samples[batch] = Sample(owner=2, batch=batch, index=0, num_tokens=513)
    with pytest.raises(ValueError, match="job 2 has 513 tokens, over the capacity of"):
        joint.pack(samples, LIMITS, PIPELINE, COST)


def test_refuses_costs_of_another_pipeline():
    with pytest.raises(ValueError, match="4 stages and the pipeline 2"):
        joint.pack([], LIMITS, Pipeline.one_f_one_b(2), COST)


def test_fills_as_well_as_first_fit_decreasing():
    """With one batch per job, the number of microbatches is that of greedy packing."""
    limits = Limits(capacity=4096, block_tokens=64)
    samples = jobs(["mix"] * 4, num_samples=32, batch_size=32)
    flat = AffineCost(base=1e6, per_token=1, per_square=0)
    cost = CostModel.uniform(1, forward=flat, backward=flat)
    ours = joint.pack(samples, limits, Pipeline(), cost)
    theirs = greedy.pack(samples, limits)
    assert len(ours.microbatches) <= len(theirs.microbatches)
    assert all(padded_tokens(m, limits) for m in ours.microbatches)

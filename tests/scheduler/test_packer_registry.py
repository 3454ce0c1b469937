"""Tests every registered packer on windows of complete global batches."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Limits,
    Pipeline,
    Sample,
    get_packer,
    lower_bound,
    violations,
)
from tests.scheduler.strategies import window_sum

LIMITS = Limits(capacity=64, block_tokens=8)


def cost(num_stages: int) -> CostModel:
    token = AffineCost(base=0.0, per_token=0.5, per_square=0.0)
    return CostModel.uniform(num_stages, forward=token, backward=token, buckets=(64,))


def samples_of(jobs) -> list[Sample]:
    return [
        Sample(owner=j, batch=b, index=i, num_tokens=n)
        for j, batches in enumerate(jobs)
        for b, lengths in enumerate(batches)
        for i, n in enumerate(lengths)
    ]


JOBS = st.lists(
    st.lists(
        st.lists(st.integers(1, 64), min_size=1, max_size=6), min_size=1, max_size=4
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", ["joint", "greedy"])
@pytest.mark.parametrize("num_stages", [1, 3])
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(jobs=JOBS)
def test_schedules_are_legal_and_deterministic(name, num_stages, jobs):
    check_twice(name, num_stages, jobs)


# Each example runs a solver twice. `test_lorafusion.py` has more of them.
@pytest.mark.parametrize("num_stages", [1, 3])
@hypothesis.settings(max_examples=4, deadline=None)
@hypothesis.given(jobs=JOBS)
def test_those_of_lorafusion_as_well(num_stages, jobs):
    check_twice("lorafusion", num_stages, jobs)


def check_twice(name, num_stages, jobs):
    samples, pipeline = samples_of(jobs), Pipeline.one_f_one_b(num_stages)
    schedule = get_packer(name)(samples, LIMITS, pipeline, cost(num_stages))
    assert violations(schedule, samples, distance=pipeline.distance) == []
    assert schedule == get_packer(name)(samples, LIMITS, pipeline, cost(num_stages))


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(jobs=JOBS)
def test_joint_is_never_slower_than_by_rounds(jobs):
    samples = samples_of(jobs)
    joint, greedy = (
        get_packer(name)(samples, LIMITS, Pipeline(), cost(1))
        for name in ("joint", "greedy")
    )
    assert window_sum(joint, cost(1)) <= window_sum(greedy, cost(1))


@pytest.mark.parametrize("capacity", [4096, 8192])
def test_small_jobs_share_the_microbatches_of_a_large_one(capacity):
    """One job has half of the tokens. The small jobs must not run alone at the end."""
    rng = np.random.default_rng(0)
    jobs = [
        [np.clip(rng.lognormal(5.5, 0.8, size), 16, 2048).astype(int) for _ in range(4)]
        for size in (4, 8, 16, 32)
    ]
    samples, limits = samples_of(jobs), Limits(capacity=capacity, block_tokens=64)
    token = AffineCost(base=0.0, per_token=0.5, per_square=0.0)
    one = CostModel.uniform(1, forward=token, backward=token, buckets=(capacity,))
    schedule = get_packer("joint")(samples, limits, Pipeline(), one)
    fewest = lower_bound(samples, limits, Pipeline(), one).microbatches
    assert len(schedule.microbatches) <= fewest + 1


def test_unknown_packer():
    with pytest.raises(ValueError, match=r"unknown packer 'best'. Choose one of \['gr"):
        get_packer("best")

"""Tests mLoRA's order: one job per microbatch, with jobs taking turns."""

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxlora.scheduler import Sample, violations
from jaxlora.scheduler.papers import mlora
from jaxlora.scheduler.types import Pipeline
from tests.scheduler.strategies import LIMITS, job_mixes


@hypothesis.given(job_mixes(), st.integers(1, 16), st.integers(1, 5))
def test_keeps_every_rule(samples, num_stages, size):
    pipeline = Pipeline.one_f_one_b(num_stages)
    options = {"samples_per_microbatch": size}
    schedule = mlora.pack(samples, LIMITS, pipeline, **options)
    assert violations(schedule, samples, distance=num_stages) == []
    assert schedule == mlora.pack(samples[::-1], LIMITS, pipeline, **options)
    for microbatch in schedule.microbatches:
        assert len(microbatch) <= size
        assert len({s.owner for s in microbatch}) <= 1


def short(job, batch, count):
    return [Sample(owner=job, batch=batch, index=i, num_tokens=9) for i in range(count)]


def test_jobs_take_turns_with_complete_batches():
    samples = [s for j in (0, 1) for b in (0, 1) for s in short(j, b, 4)]
    schedule = mlora.pack(
        samples, LIMITS, Pipeline.one_f_one_b(2), samples_per_microbatch=2
    )
    order = [(m[0].owner, m[0].batch) for m in schedule.microbatches]
    assert order == [(j, b) for b in (0, 1) for j in (0, 1) for _ in range(2)]


def test_waits_for_the_optimizer_step():
    samples = short(0, 0, 1) + short(0, 1, 1) + short(1, 0, 1)
    schedule = mlora.pack(samples, LIMITS, Pipeline.one_f_one_b(4))
    assert [len(m) for m in schedule.microbatches] == [1, 1, 0, 0, 1]


def test_splits_before_the_capacity_is_exceeded():
    samples = [Sample(owner=0, batch=0, index=i, num_tokens=200) for i in range(4)]
    schedule = mlora.pack(samples, LIMITS, Pipeline())
    assert [len(m) for m in schedule.microbatches] == [2, 2]


def test_refuses_a_sample_over_the_capacity():
    sample = Sample(owner=2, batch=0, index=0, num_tokens=513)
    with pytest.raises(ValueError, match="job 2 has 513 tokens, over the capacity of"):
        mlora.pack([sample], LIMITS, Pipeline())


def test_options_are_checked():
    with pytest.raises(ValueError, match="must be positive, got 0"):
        mlora.pack([], LIMITS, Pipeline(), samples_per_microbatch=0)

"""Tests first-fit decreasing, and that the checker finds every kind of violation."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxlora.scheduler import (
    Limits,
    Pipeline,
    Sample,
    Schedule,
    greedy,
    padded_tokens,
    violations,
)

PACKERS = {"greedy": greedy.pack}
LIMITS = Limits(capacity=512, block_tokens=32)


@st.composite
def windows(draw):
    """One global batch of each of up to 6 jobs."""
    lengths = st.lists(st.integers(1, 512), min_size=1, max_size=12)
    jobs = draw(st.lists(lengths, min_size=1, max_size=6))
    return [
        Sample(owner=job, batch=job, index=i, num_tokens=n)
        for job, job_lengths in enumerate(jobs)
        for i, n in enumerate(job_lengths)
    ]


@pytest.mark.parametrize("packer", PACKERS)
@hypothesis.given(samples=windows())
def test_keeps_every_rule(packer, samples):
    schedule = PACKERS[packer](samples, LIMITS)
    assert violations(schedule, samples) == []
    assert schedule == PACKERS[packer](samples, LIMITS)


@pytest.mark.parametrize("packer", PACKERS)
def test_wastes_no_microbatch(packer):
    """No two microbatches would fit in one."""
    samples = [
        Sample(owner=i % 3, batch=0, index=i // 3, num_tokens=40 + 11 * i)
        for i in range(18)
    ]
    microbatches = PACKERS[packer](samples, LIMITS).microbatches
    sizes = sorted(padded_tokens(m, LIMITS) for m in microbatches)
    assert sizes[0] + sizes[1] > LIMITS.capacity


def test_refuses_a_sample_over_the_capacity():
    sample = Sample(owner=2, batch=0, index=0, num_tokens=513)
    with pytest.raises(ValueError, match="job 2 has 513 tokens, over the capacity of"):
        greedy.pack([sample], LIMITS)


def test_refuses_two_batches_of_one_job():
    samples = [Sample(owner=0, batch=b, index=0, num_tokens=9) for b in (0, 1)]
    with pytest.raises(ValueError, match="job 0 has samples of batches 0 and 1"):
        greedy.pack(samples, LIMITS)


def test_the_checker_finds_every_kind_of_violation():
    a0, a1 = (Sample(owner=0, batch=0, index=i, num_tokens=300) for i in range(2))
    b0 = Sample(owner=1, batch=0, index=0, num_tokens=10)
    late = dataclasses.replace(a1, batch=1)

    def check(microbatches, samples):
        return violations(Schedule(microbatches=microbatches, limits=LIMITS), samples)

    assert "scheduled 2 times" in check(((a0,), (a0,)), [a0])[0]
    assert "is not scheduled" in check(((a0,),), [a0, b0])[0]
    assert "was not asked for" in check(((a0, b0),), [a0])[0]
    assert "over its capacity of 512" in check(((a0, a1),), [a0, a1])[0]
    # Each job takes whole blocks: 128 and 416 tokens, although 100 and 410 would fit.
    alone, beside = (
        Sample(owner=i, batch=0, index=0, num_tokens=n)
        for i, n in enumerate((100, 410))
    )
    found = check(((alone, beside),), [alone, beside])[0]
    assert "takes 544 tokens, over its capacity of 512" in found
    assert "is empty" in check(((a0,), ()), [a0])[0]
    assert "mixes batches [0, 1]" in check(((a0, late),), [a0, late])[-1]
    assert "after its batch 1" in check(((late,), (a0,)), [a0, late])[0]
    small = [dataclasses.replace(s, num_tokens=5) for s in (a0, a1)]
    assert "adjacent" in check(((small[0], b0, small[1]),), [*small, b0])[0]


def test_the_checker_requires_the_distance():
    a, b = (Sample(owner=0, batch=k, index=0, num_tokens=9) for k in (0, 2))
    other = Sample(owner=1, batch=0, index=0, num_tokens=9)

    def check(*microbatches, distance):
        schedule = Schedule(microbatches=microbatches, limits=LIMITS)
        samples = [s for m in microbatches for s in m]
        return violations(schedule, samples, distance=distance)

    assert check((a,), (other,), (), (b,), distance=3) == []
    assert check((a,), (other,), (), (b,), distance=4) == [
        "batch 2 of job 0 starts in tick 3, 3 after the end of batch 0, but the "
        "distance must be at least 4."
    ]
    assert check((a,), (b,), distance=1) == []
    assert "is empty" in check((a,), (), (b,), distance=1)[0]
    assert len(check((b,), (other,), (a,), distance=2)) == 1
    with pytest.raises(ValueError, match="distance=0"):
        check((a,), distance=0)


def test_pipelines_are_checked():
    assert Pipeline.one_f_one_b(4) == Pipeline(num_stages=4, distance=4)
    assert Pipeline.one_f_one_b(1) == Pipeline()
    assert Pipeline.one_f_one_b(4, 6).distance == 6
    with pytest.raises(ValueError, match="in_flight=3 is less than the 4 stages"):
        Pipeline.one_f_one_b(4, 3)
    with pytest.raises(ValueError, match="must be positive, got 0 and 1"):
        Pipeline(num_stages=0)


@pytest.mark.parametrize(("capacity", "block"), [(100, 64), (0, 1), (64, 0)])
def test_limits_are_checked(capacity, block):
    with pytest.raises(ValueError, match=f"{capacity}"):
        Limits(capacity=capacity, block_tokens=block)

"""Tests plans, their charts, and the proposed capacities."""

import pytest

from jaxlora.bench.scheduler.lengths import jobs
from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    joint,
    plan,
)
from jaxlora.scheduler.capacity import Step, profile, propose

LIMITS = Limits(capacity=6144, block_tokens=64)
PIPELINE = Pipeline.one_f_one_b(4)
COST = CostModel.uniform(
    4,
    forward=AffineCost(base=256, per_token=1, per_square=2e-5),
    backward=AffineCost(base=256, per_token=1, per_square=5e-5),
)


def test_a_plan_is_close_to_the_best_possible():
    samples = jobs(["mix"] * 4, num_samples=320, batch_size=16)
    made = plan(samples, LIMITS, PIPELINE, COST)
    assert 0 <= made.gap <= 0.05
    assert made.gap == made.simulation.makespan / made.bound.makespan - 1


def test_refuses_an_illegal_schedule():
    samples = jobs(["xsum"], num_samples=6, batch_size=3)

    def merged(samples, limits, pipeline, cost):
        good = joint.pack(samples, limits, pipeline, cost)
        full = tuple(m for m in good.microbatches if m)
        return Schedule(microbatches=full, limits=limits)

    with pytest.raises(RuntimeError, match="the first: batch 1 of job 0 starts in"):
        plan(samples, LIMITS, PIPELINE, COST, packer=merged)


def device(num_samples, length):
    """Simulates a device that needs 8 GB for the model and 1 MB per token."""
    tokens, squares = num_samples * length, num_samples * length**2
    return Step(
        forward_seconds=1e-3 + 1e-5 * tokens + 1e-10 * squares,
        backward_seconds=2e-3 + 2e-5 * tokens + 3e-10 * squares,
        peak_bytes=8e9 + 1e6 * tokens + 10 * squares,
    )


MEASURED = profile(device, capacities=[2048, 4096, 8192], lengths=[64, 512, 3000])


def proposals(memory_bytes, **kwargs):
    samples = jobs(["mix"] * 4, num_samples=64, batch_size=16)
    return propose(
        samples,
        MEASURED,
        capacities=[2048, 4096, 8192],
        num_stages=[1, 2, 4],
        block_tokens=64,
        memory_bytes=memory_bytes,
        **kwargs,
    )


def test_profile_fits_what_was_measured():
    assert MEASURED.forward.mape < 1e-9
    assert MEASURED.backward.cost.per_token == pytest.approx(2e-5)
    assert MEASURED.memory.model.base == pytest.approx(8e9)


def test_proposes_one_device_where_the_model_fits():
    best = proposals(80e9)[0]
    assert best.num_stages == 1
    assert best.bubble == pytest.approx(0)
    assert best.fits


def test_proposes_stages_if_memory_is_short():
    best, *others = proposals(8e9)
    assert best.num_stages > 1
    assert best.peak_bytes <= 8e9
    assert any(not t.fits and t.device_seconds < best.device_seconds for t in others)
    # The longest sample has more than 2048 tokens.
    assert {t.capacity for t in [best, *others]} == {4096, 8192}


def test_refuses_if_no_candidate_fits():
    with pytest.raises(ValueError, match=r"fits in 1e\+09 bytes"):
        proposals(1e9)
    long = [Sample(owner=0, batch=0, index=0, num_tokens=9000)]
    with pytest.raises(ValueError, match="longest sample, 9000 tokens"):
        propose(
            long, MEASURED, capacities=[4096], num_stages=[1], block_tokens=64,
            memory_bytes=1e12,
        )  # fmt: skip

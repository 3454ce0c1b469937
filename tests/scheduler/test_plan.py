"""Tests plans."""

import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Limits,
    Pipeline,
    Schedule,
    joint,
    plan,
)
from scripts.bench.scheduler.lengths import jobs

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

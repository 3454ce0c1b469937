"""The time of replicas of different sizes ends with the last of them."""

import pytest

from jaxlora.scheduler import AffineCost, CostModel, Limits, Sample, Schedule
from jaxlora.train.plan.auto_mesh.predict import _replica_seconds
from jaxlora.train.plan.lanes import replica_lanes


def test_the_busiest_replica():
    half = AffineCost(base=1.0, per_token=0.5, per_square=0.0)
    cost = CostModel.uniform(1, forward=half, backward=half, buckets=(64,))
    lanes = replica_lanes((64, 16), cost)
    assert [(r.capacity, r.work) for r in lanes.replicas] == [(64, 10000), (16, 2727)]
    assert lanes.num_lanes == 5  # 3.67 small microbatches in a tick
    full = (Sample(owner=0, batch=0, index=0, num_tokens=9),)
    ticks = [(full, full, full, (), ()), ((), full, full, full, full)]
    schedule = Schedule(
        microbatches=sum(ticks, ()), limits=Limits(capacity=64, block_tokens=16)
    )
    small, large = 6 * (2 + 16), 2 + 64
    found = _replica_seconds(lanes, schedule, cost, 0.0)
    assert found == pytest.approx(max(small, large))
    squares = _replica_seconds(lanes, schedule, cost, 0.5)
    assert squares == pytest.approx(max(small + 6 * 0.5 * 81, large + 0.5 * 81))


def test_a_batch_waits_for_the_one_before():
    """Replicas that take turns with the batches of one job add up."""
    half = AffineCost(base=1.0, per_token=0.5, per_square=0.0)
    cost = CostModel.uniform(1, forward=half, backward=half, buckets=(64,))
    lanes = replica_lanes((64, 64), cost)
    one, two, other = (
        (Sample(owner=owner, batch=batch, index=0, num_tokens=9),)
        for owner, batch in ((0, 0), (0, 1), (1, 0))
    )
    limits = Limits(capacity=64, block_tokens=16)
    for ticks, number in (
        ([(one, other)], 1),
        ([(one, ()), ((), two)], 2),
        ([(one, ()), ((), other)], 1),
    ):
        schedule = Schedule(microbatches=sum(ticks, ()), limits=limits)
        found = _replica_seconds(lanes, schedule, cost, 0.0)
        assert found == pytest.approx(number * (2 + 64))

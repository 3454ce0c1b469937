"""The time of replicas of different sizes is that of the replica with the most work."""

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
    assert _replica_seconds(lanes, schedule, cost) == pytest.approx(max(small, large))

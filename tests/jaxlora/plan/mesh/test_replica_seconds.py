"""The time of replicas of different sizes ends with the last of them."""

import pytest

from jaxlora.config.replicas_config import ReplicaShape
from jaxlora.plan.lanes import replica_lanes
from jaxlora.plan.mesh.predict import _lane_seconds
from jaxlora.scheduler import Limits, Sample, Schedule


def test_the_busiest_replica():
    first, second = ReplicaShape(tokens=64), ReplicaShape(tokens=16)
    lanes = replica_lanes((first, second), {first: 2.0 + 64, second: 2.0 + 16})
    assert [(r.capacity, r.work) for r in lanes.replicas] == [(64, 10000), (16, 2727)]
    assert lanes.num_lanes == 5  # 3.67 small microbatches in a tick
    full = (Sample(owner=0, batch=0, index=0, num_tokens=9),)
    ticks = [(full, full, full, (), ()), ((), full, full, full, full)]
    schedule = Schedule(
        microbatches=sum(ticks, ()), limits=Limits(capacity=64, block_tokens=16)
    )
    small, large = 6 * (2 + 16), 2 + 64
    found = _lane_seconds(lanes, schedule, 66.0, 0.0)
    assert found == pytest.approx(max(small, large), rel=1e-3)  # works are rounded
    squares = _lane_seconds(lanes, schedule, 66.0, 0.5)
    expected = max(small + 6 * 0.5 * 81, large + 0.5 * 81)
    assert squares == pytest.approx(expected, rel=1e-3)


def test_devices_of_a_replica_share_the_squares():
    first, second = ReplicaShape(tokens=64, tensor=2), ReplicaShape(tokens=64)
    lanes = replica_lanes((first, second), {first: 40.0, second: 66.0})
    assert [r.num_devices for r in lanes.replicas] == [2, 1]
    one, two = (
        (Sample(owner=owner, batch=0, index=0, num_tokens=n),)
        for owner, n in ((0, 60), (1, 9))
    )
    schedule = Schedule(
        microbatches=(one, two), limits=Limits(capacity=64, block_tokens=16)
    )
    found = _lane_seconds(lanes, schedule, 40.0, 0.5)
    assert found == pytest.approx(max(40 + 0.5 * 3600 / 2, 66 + 0.5 * 81), rel=1e-3)


def test_a_batch_waits_for_the_one_before():
    """Replicas that take turns with the batches of one job add up."""
    shape = ReplicaShape(tokens=64)
    lanes = replica_lanes((shape, shape), {shape: 66.0})
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
        found = _lane_seconds(lanes, schedule, 66.0, 0.0)
        assert found == pytest.approx(number * (2 + 64))

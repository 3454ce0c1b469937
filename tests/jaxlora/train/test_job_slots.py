"""Tests the slots and ticks of a window on several replicas."""

from jaxlora.scheduler import Lanes, Limits
from jaxlora.train.plan.job_slots import (
    JobPosition,
    assign_slots,
    next_samples,
    pack_whole,
)

PINNED = Lanes(data=2, slots_per_replica=2)


def position(job, *, slot=None, num_steps=5, batch_tokens=100.0, priority=0):
    return JobPosition(
        job=job,
        priority=priority,
        slot=slot,
        step=0,
        num_steps=num_steps,
        batch_tokens=batch_tokens,
    )


def slots(positions, num_slots, *, preempts=False) -> list[int | None]:
    assigned = assign_slots(positions, num_slots, preempts=preempts, lanes=PINNED)
    return [p.slot for p in assigned]


def test_pinned_jobs_start_on_the_replica_with_the_least_work():
    new = [position(0, batch_tokens=300.0), position(1), position(2), position(3)]
    assert slots(new[:3], 4) == [0, 2, 3]
    running = [position(0, slot=3, num_steps=50), *new[1:]]
    assert slots(running, 4) == [3, 0, 1, 2]


def test_pinning_does_not_change_which_jobs_start():
    """The slots are rounded up to a multiple of the replicas, but stay unused."""
    positions = [
        position(0, slot=2),
        position(1, num_steps=9),
        position(2),
        position(3, priority=1),
    ]
    assert slots(positions, 3) == [2, 0, None, 3]
    assert slots(positions, 1) == [2, None, None, None]
    assert slots(positions, 1, preempts=True) == [None, None, None, 0]


def test_a_window_of_pinned_jobs():
    positions = assign_slots(
        [position(job) for job in range(4)], 4, preempts=False, lanes=PINNED
    )
    samples = next_samples(positions, 2, lambda job, step: [40, 50])
    limits = Limits(capacity=128, block_tokens=32)
    packed = pack_whole(samples, limits, "joint", PINNED)
    assert len(packed.microbatches) % 2 == 0
    for i, microbatch in enumerate(packed.microbatches):
        assert {s.owner // 2 for s in microbatch} <= {i % 2}

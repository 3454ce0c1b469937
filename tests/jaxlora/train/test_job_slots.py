"""Which jobs get the slots."""

from jaxlora.plan.job.job_slots import JobPosition, assign_slots


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
    assigned = assign_slots(positions, num_slots, preempts=preempts)
    return [p.slot for p in assigned]


def test_a_running_job_keeps_its_slot():
    """The others take the lowest free ones, by priority and then in their order."""
    positions = [
        position(0, slot=2),
        position(1, num_steps=9),
        position(2),
        position(3, priority=1),
    ]
    assert slots(positions, 3) == [2, 1, None, 0]
    assert slots(positions, 1) == [2, None, None, None]
    assert slots(positions, 1, preempts=True) == [None, None, None, 0]

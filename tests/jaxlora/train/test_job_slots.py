"""Which jobs get the slots."""

from jaxlora.plan.job.job_slots import assign_slots
from jaxlora.scheduler.admission import Candidate


def slots(jobs, num_slots, *, preempts=False) -> list[int | None]:
    """Slots of jobs, each given by the slot that it has and its priority."""
    candidates = [Candidate(job=i, priority=p) for i, (_, p) in enumerate(jobs)]
    held = {i: slot for i, (slot, _) in enumerate(jobs) if slot is not None}
    assigned = assign_slots(candidates, held, num_slots, preempts=preempts)
    return [assigned.get(i) for i in range(len(jobs))]


def test_a_running_job_keeps_its_slot():
    """The others take the lowest free ones, by priority and then in their order."""
    jobs = [(2, 0), (None, 0), (None, 0), (None, 1)]
    assert slots(jobs, 3) == [2, 1, None, 0]
    assert slots([(1, 0), *jobs[1:]], 3) == [1, 2, None, 0]
    assert slots(jobs, 1) == [2, None, None, None]
    assert slots(jobs, 1, preempts=True) == [None, None, None, 0]


def test_higher_priorities_take_slots():
    """The lowest priority gives way, of equals the last; only to a higher one."""
    jobs = [(1, 0), (0, 0), (2, 2), (None, 2), (None, 0)]
    assert slots(jobs, 3) == [1, 0, 2, None, None]
    assert slots(jobs, 3, preempts=True) == [1, None, 2, 0, None]
    # Where no job is paused, both settings choose the same jobs and slots.
    waiting = [(None, i % 3) for i in range(7)]
    assert slots(waiting, 3, preempts=True) == slots(waiting, 3)
    # A paused job continues before those of its priority that came after it.
    assert slots([(0, 0)], 3, preempts=True) == [0]

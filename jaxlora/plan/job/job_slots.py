"""Assigns the slots of a run to jobs.

The assignment is pure, and depends only on the jobs and the slots that they have. The
trainer and `jaxlora plan` use it alike.
"""

from collections.abc import Mapping, Sequence

from jaxlora.scheduler.admission import Candidate, admit


def assign_slots(
    candidates: Sequence[Candidate],
    slots: Mapping[int, int],
    num_slots: int,
    *,
    preempts: bool,
) -> dict[int, int]:
    """Chooses the jobs that have the slots.

    Waiting jobs start by priority, then by order of arrival. They take the lowest free
    slots. A running job keeps its slot.

    Args:
        candidates: The jobs that may run, in order of arrival.
        slots: Slot of each of them that runs, by its number.
        num_slots: Number of jobs that may run at the same time.
        preempts: Whether a waiting job may also take the slot of a running job of
            strictly lower priority.

    Returns:
        The slots by job; a job that waits or is to pause has none.
    """
    # There is no estimate of memory, because slots and microbatches take theirs when
    # the run starts.
    running = [c for c in candidates if c.job in slots]
    waiting = [c for c in candidates if c.job not in slots]
    paused, started = admit(running, waiting, num_slots, preempts=preempts)
    gone = {candidate.job for candidate in paused}
    slots = {job: slot for job, slot in slots.items() if job not in gone}
    taken = set(slots.values())
    free = [slot for slot in range(num_slots) if slot not in taken]
    return {**slots, **{c.job: slot for c, slot in zip(started, free, strict=False)}}

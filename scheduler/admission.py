"""Chooses which jobs run: higher priorities first, then first come, first served.

Every job takes one slot, and a slot takes the same memory whichever job has it. So
jobs have no estimates of their own.

References:
    mLoRA, https://arxiv.org/abs/2312.02515, section 3.4.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A job that waits for a slot, or runs and may have to give its slot up.

    Attributes:
        job: Number of the job.
        priority: Jobs with a higher priority start first.
    """

    job: int
    priority: int = 0


def admit(
    running: Sequence[Candidate],
    waiting: Sequence[Candidate],
    num_slots: int,
    *,
    preempts: bool,
) -> tuple[list[Candidate], list[Candidate]]:
    """Chooses which jobs start, and which running ones are paused for them.

    A job is paused only for a job of strictly higher priority, and no more jobs are
    paused than necessary. The job with the lowest priority is paused first; among equal
    priorities, the one that arrived last. The caller lets a paused job finish its
    current batch.

    Args:
        running: Running jobs, in order of arrival.
        waiting: Waiting jobs, in order of arrival.
        num_slots: Number of jobs that may run at the same time. If more run already,
            they go on until a job of higher priority starts.
        preempts: Whether running jobs may be paused.

    Returns:
        The jobs to pause, the lowest priority first; and the jobs to start, in the
        order in which they take free slots.
    """
    order = sorted(range(len(running)), key=lambda i: (running[i].priority, -i))
    weakest = [running[i] for i in order]
    paused: list[Candidate] = []
    started: list[Candidate] = []
    for job in sorted(waiting, key=lambda c: -c.priority):  # a stable sort
        excess = len(weakest) + len(started) + 1 - num_slots
        leaving = weakest[: max(0, excess)] if preempts else []
        if len(leaving) < excess or any(c.priority >= job.priority for c in leaving):
            break  # it blocks the jobs behind it in the queue
        paused += leaving
        del weakest[: len(leaving)]
        started.append(job)
    return paused, started

"""Chooses which jobs run: higher priorities first, then first come, first served.

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
        memory_bytes: Estimated memory that the job needs while it runs, for example
            from `calibrate.MemoryModel`. Memory that is allocated whether or not the
            job runs does not count. 0 means that there is no estimate.
    """

    job: int
    priority: int = 0
    memory_bytes: float = 0.0


def admit(
    waiting: Sequence[Candidate],
    num_free: int,
    *,
    memory_left: float = float("inf"),
) -> list[Candidate]:
    """Chooses the jobs that start now, in the order in which they take free slots.

    A job that does not fit in memory blocks the jobs behind it in the queue. If smaller
    jobs, or jobs of lower priority, could overtake it, it might never start.

    Args:
        waiting: Waiting jobs, in order of arrival.
        num_free: Number of free slots.
        memory_left: Free memory in bytes.

    Raises:
        ValueError: A memory estimate is negative or NaN.
    """
    _check(waiting)
    started: list[Candidate] = []
    for job in sorted(waiting, key=lambda c: -c.priority):  # a stable sort
        if len(started) >= num_free or job.memory_bytes > memory_left:
            break
        memory_left -= job.memory_bytes
        started.append(job)
    return started


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Preemption:
    """The jobs to pause and the jobs to start between two microbatches.

    Attributes:
        paused: Running jobs that give up their slots, in order of ascending priority.
        started: Waiting jobs that start now.
    """

    paused: tuple[Candidate, ...] = ()
    started: tuple[Candidate, ...] = ()


def preempt(
    running: Sequence[Candidate],
    waiting: Sequence[Candidate],
    num_slots: int,
    *,
    memory_bytes: float = float("inf"),
) -> Preemption:
    """Replaces running jobs by waiting jobs of higher priority.

    A job is paused only for a job of strictly higher priority, and no more jobs are
    paused than necessary. The job with the lowest priority is paused first; among equal
    priorities, the one that arrived last. The caller lets a paused job finish its
    current batch (`Planner.pause`).

    Args:
        running: Running jobs, in order of arrival.
        waiting: Waiting jobs, in order of arrival.
        num_slots: Total number of slots.
        memory_bytes: Memory for all jobs together, in bytes.

    Raises:
        ValueError: A memory estimate is negative or NaN.
    """
    _check([*running, *waiting])
    kept = list(running)
    paused: list[Candidate] = []
    started: list[Candidate] = []

    def has_room(job: Candidate, others: Sequence[Candidate]) -> bool:
        used = sum(c.memory_bytes for c in others)
        return len(others) < num_slots and used + job.memory_bytes <= memory_bytes

    for job in sorted(waiting, key=lambda c: -c.priority):
        order = sorted(range(len(kept)), key=lambda i: (kept[i].priority, -i))
        weaker = [kept[i] for i in order if kept[i].priority < job.priority]
        leaving: list[Candidate] = []
        staying = [*kept, *started]
        while weaker and not has_room(job, staying):
            leaving.append(weaker.pop(0))
            staying.remove(leaving[-1])
        if not has_room(job, staying):
            break  # it blocks the jobs behind it in the queue, as in `admit`
        # Pausing a large job may make room enough for a smaller one to stay.
        for spared in reversed(leaving):
            if has_room(job, [*staying, spared]):
                staying.append(spared)
        leaving = [c for c in leaving if c not in staying]
        kept = [c for c in kept if c not in leaving]
        paused += leaving
        started.append(job)
    return Preemption(paused=tuple(paused), started=tuple(started))


def _check(jobs: Sequence[Candidate]) -> None:
    for job in jobs:
        if not job.memory_bytes >= 0:
            raise ValueError(
                f"job {job.job} has a memory estimate of {job.memory_bytes} bytes. An "
                "estimate must be at least 0."
            )

"""Which jobs run: by priority, then first come first served.

References:
    mLoRA, https://arxiv.org/abs/2312.02515, section 3.4.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A job that waits.

    Attributes:
        job: Its number.
        priority: Higher ones start first.
        memory_bytes: What it is estimated to need, beyond what is taken whether it
            runs or not; `calibrate.MemoryModel` estimates it. 0: it is not known.
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

    A job whose estimate does not fit lets nobody past it: later ones, which are smaller
    or of lower priority, would keep it waiting for good.

    Args:
        waiting: In the order in which they came.
        num_free: Free slots.
        memory_left: Bytes that nobody has taken.

    Raises:
        ValueError: An estimate is negative or not a number.
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
class Change:
    """Who makes room for whom between two windows.

    Attributes:
        paused: Jobs that run and give their slots up, the least important first.
        started: Jobs that waited and start now.
    """

    paused: tuple[Candidate, ...] = ()
    started: tuple[Candidate, ...] = ()


def preempt(
    running: Sequence[Candidate],
    waiting: Sequence[Candidate],
    num_slots: int,
    *,
    memory_bytes: float = float("inf"),
) -> Change:
    """Lets waiting jobs of higher priority take the place of running ones.

    A job only ever gives way to one of strictly higher priority, the lowest first and
    of equals the one that came last, and only as many do as are needed. What is under
    way is finished: the caller pauses a job after its batch (`Planner.pause`).

    Args:
        running: In the order in which they came.
        waiting: In the order in which they came.
        num_slots: Slots in all.
        memory_bytes: For all jobs together.

    Raises:
        ValueError: An estimate is negative or not a number.
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
            break  # nobody gets past it
        for spared in reversed(leaving):  # whom the others' leaving has made room for
            if has_room(job, [*staying, spared]):
                staying.append(spared)
        leaving = [c for c in leaving if c not in staying]
        kept = [c for c in kept if c not in leaving]
        paused += leaving
        started.append(job)
    return Change(paused=tuple(paused), started=tuple(started))


def _check(jobs: Sequence[Candidate]) -> None:
    for job in jobs:
        if not job.memory_bytes >= 0:
            raise ValueError(
                f"job {job.job} is estimated to need {job.memory_bytes} bytes; an "
                "estimate is 0 or more."
            )

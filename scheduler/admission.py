"""Which waiting jobs start: by priority, then first come first served.

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
    for job in waiting:
        if not job.memory_bytes >= 0:
            raise ValueError(
                f"job {job.job} is estimated to need {job.memory_bytes} bytes; an "
                "estimate is 0 or more."
            )
    started: list[Candidate] = []
    for job in sorted(waiting, key=lambda c: -c.priority):  # a stable sort
        if len(started) >= num_free or job.memory_bytes > memory_left:
            break
        memory_left -= job.memory_bytes
        started.append(job)
    return started

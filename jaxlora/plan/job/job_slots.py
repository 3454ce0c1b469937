"""Assigns the slots of a run to jobs.

The assignment is pure, and depends only on the position of each job. The trainer and
`jaxlora plan` use it alike.
"""

import dataclasses
from collections.abc import Sequence

from jaxlora.scheduler.admission import Candidate, admit, preempt
from jaxlora.scheduler.streams.state import Position


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobPosition(Candidate):
    """The position of a job that has not ended, between two of its global batches.

    Jobs are numbered in order of arrival.

    Attributes:
        slot: Slot of the job; None while it waits or is paused.
        step: Optimizer steps done.
        num_steps: Optimizer steps in all.
        batch_tokens: Mean number of tokens of a global batch, which balances replicas.
    """

    slot: int | None
    step: int
    num_steps: int
    batch_tokens: float = 1.0

    @property
    def in_stream(self) -> Position:
        """The position by which microbatches are planned; the job has a slot."""
        assert self.slot is not None, f"job {self.job} has no slot"
        return Position(
            job=self.job,
            owner=self.slot,
            batch=self.step,
            num_batches=self.num_steps,
            batch_tokens=self.batch_tokens,
        )


def assign_slots(
    positions: Sequence[JobPosition],
    num_slots: int,
    *,
    preempts: bool,
) -> list[JobPosition]:
    """Chooses the jobs that have the slots.

    Waiting jobs start by priority, then by order of arrival. They take the lowest free
    slots. A running job keeps its slot.

    Args:
        positions: Positions of the jobs that may run, in order of arrival.
        num_slots: Number of jobs that may run at the same time.
        preempts: Whether a waiting job may also take the slot of a running job of
            strictly lower priority.

    Returns:
        The positions with their slots; a job that waits or is to pause has none.
    """
    # There is no estimate of memory, because slots and microbatches take theirs when
    # the run starts.
    running = [p for p in positions if p.slot is not None]
    waiting = [p for p in positions if p.slot is None]
    slots = {p.job: p.slot for p in positions if p.slot is not None}
    if preempts:
        change = preempt(running, waiting, num_slots)
        started = change.started
        for candidate in change.paused:
            del slots[candidate.job]
    else:
        started = admit(waiting, num_slots - len(running))
    taken = set(slots.values())
    free = [slot for slot in range(num_slots) if slot not in taken]
    slots |= {c.job: slot for c, slot in zip(started, free, strict=False)}
    return [dataclasses.replace(p, slot=slots.get(p.job)) for p in positions]

"""Assigns the slots of a run to jobs, and gives the first samples of these jobs.

The functions are pure, and depend only on the position of each job. The trainer and
`jaxlora plan` use them alike.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Limits,
    PackerName,
    Sample,
    Schedule,
    pack_ticks,
)
from jaxlora.scheduler.admission import Candidate, admit, preempt
from jaxlora.scheduler.lanes import ONE_LANE
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


def next_samples(
    positions: Sequence[JobPosition],
    num_steps: int,
    lengths: Callable[[int, int], Sequence[int]],
) -> tuple[Sample, ...]:
    """Returns the samples of the next steps; they name their job by its slot.

    Args:
        positions: Positions of the jobs, with their slots.
        num_steps: Largest number of optimizer steps of a job.
        lengths: Given the number of a job and a step, returns the tokens of each sample
            of that global batch.
    """
    return tuple(
        Sample(owner=position.slot, batch=step, index=i, num_tokens=num_tokens)
        for position in positions
        if position.slot is not None
        for step in range(
            position.step, min(position.step + num_steps, position.num_steps)
        )
        for i, num_tokens in enumerate(lengths(position.job, step))
    )


def fixed_shape_cost(capacity: int, num_stages: int = 1) -> CostModel:
    """Returns the cost of microbatches that all run in one shape, padding included.

    The unit is the time that one device needs for the forward and backward pass of one
    token through the whole model.
    """
    half = AffineCost(base=0.0, per_token=0.5 / num_stages, per_square=0.0)
    return CostModel.uniform(
        num_stages, forward=half, backward=half, buckets=(capacity,)
    )


def pack_whole(
    samples: Sequence[Sample],
    limits: Limits,
    packer: PackerName,
    lanes: Lanes = ONE_LANE,
) -> Schedule:
    """Packs whole batches into ticks of the lanes, which all run in one shape.

    Args:
        samples: The samples; they name their job by its slot.
        limits: Limits of a microbatch.
        packer: Name of the packer.
        lanes: The lanes of the run; by default one device.

    Returns:
        A schedule whose number of microbatches is a multiple of the number of lanes.

    Raises:
        ValueError: A sample is longer than the capacity.
    """
    cost = fixed_shape_cost(limits.capacity, lanes.pipeline.num_stages)
    return pack_ticks(samples, limits, packer, lanes, cost)

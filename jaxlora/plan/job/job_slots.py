"""Assigns the slots of a run to jobs, and packs whole batches of them."""

from collections.abc import Mapping, Sequence

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
    if preempts:
        change = preempt(running, waiting, num_slots)
        started = change.started
        paused = {candidate.job for candidate in change.paused}
        slots = {job: slot for job, slot in slots.items() if job not in paused}
    else:
        started = admit(waiting, num_slots - len(running))
    taken = set(slots.values())
    free = [slot for slot in range(num_slots) if slot not in taken]
    return {**slots, **{c.job: slot for c, slot in zip(started, free, strict=False)}}


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

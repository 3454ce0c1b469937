"""Who runs in the next window, and with which samples: functions of where jobs are.

The trainer, its planning ahead and `jaxlora plan` all go by these.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Limits,
    PackerName,
    Sample,
    Schedule,
    get_packer,
)
from jaxlora.scheduler.admission import Candidate, admit
from jaxlora.scheduler.types import Pipeline


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a job that has not ended stands between two windows.

    Attributes:
        job: Its number, in the order in which jobs came.
        priority: Which of the waiting jobs start first.
        slot: Its slot; None while it waits.
        step: Optimiser steps behind it.
        num_steps: Optimiser steps in all.
    """

    job: int
    priority: int
    slot: int | None
    step: int
    num_steps: int

    def steps(self, window_steps: int) -> range:
        """The optimiser steps that it takes in the next window."""
        if self.slot is None:
            return range(0)
        return range(self.step, min(self.step + window_steps, self.num_steps))


def fill_slots(places: Sequence[Place], num_slots: int) -> list[Place]:
    """The same, with waiting jobs in the free slots, the lowest slot first."""
    taken = {place.slot for place in places}
    free = [slot for slot in range(num_slots) if slot not in taken]
    waiting = [
        Candidate(job=place.job, priority=place.priority)
        for place in places
        if place.slot is None
    ]
    # No estimate of memory: slots and microbatches take theirs when the run starts.
    started = admit(waiting, len(free))
    slots = {c.job: slot for c, slot in zip(started, free, strict=False)}
    return [dataclasses.replace(p, slot=slots.get(p.job, p.slot)) for p in places]


def after_window(places: Sequence[Place], window_steps: int) -> list[Place]:
    """Where jobs stand after a window in which none ended early or joined."""
    moved = [
        dataclasses.replace(p, step=p.step + len(p.steps(window_steps))) for p in places
    ]
    return [place for place in moved if place.step < place.num_steps]


def window_samples(
    places: Sequence[Place],
    window_steps: int,
    lengths: Callable[[int, int], Sequence[int]],
) -> tuple[Sample, ...]:
    """The samples of the next window; jobs are named by slot.

    Args:
        places: Where the jobs stand, slots filled.
        window_steps: Most optimiser steps of a job in a window.
        lengths: Given a job's number and a step, tokens of each sample of its batch.
    """
    return tuple(
        Sample(job=place.slot, batch=step, index=i, num_tokens=num_tokens)
        for place in places
        if place.slot is not None
        for step in place.steps(window_steps)
        for i, num_tokens in enumerate(lengths(place.job, step))
    )


def fixed_shape_cost(capacity: int, num_stages: int = 1) -> CostModel:
    """Costs where all microbatches run in one shape, so that padding takes its time.

    In tokens: 1 is what a device takes for a token, forward and backward, through all
    of the model.
    """
    half = AffineCost(base=0.0, per_token=0.5 / num_stages, per_square=0.0)
    return CostModel.uniform(
        num_stages, forward=half, backward=half, buckets=(capacity,)
    )


def pack_window(
    samples: Sequence[Sample], limits: Limits, packer: PackerName
) -> Schedule:
    """A window's microbatches for one device: a job's next batch may follow at once."""
    cost = fixed_shape_cost(limits.capacity)
    return get_packer(packer)(samples, limits, Pipeline(), cost)

"""Ticks of a schedule that is made beforehand, in which no job joins or leaves."""

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence

from jaxlora.plan.stream_plan import StreamTick
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
from jaxlora.scheduler.lanes import ONE_LANE, ticks_of
from jaxlora.scheduler.stream.state import Position, Rules, StreamState
from jaxlora.scheduler.stream.stream import next_stretch


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


def pack_stream(samples: Sequence[Sample], rules: Rules) -> Schedule:
    """Packs samples as the trainer does, stretch by stretch.

    Args:
        samples: The samples of jobs that are all there from the first tick on; they
            name their job by its slot.
        rules: The rules of the run.
    """
    lengths: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for s in samples:
        lengths[s.owner][s.batch].append(s.num_tokens)
    state, ticks = StreamState(), []
    for job, batches in lengths.items():
        position = Position(
            job=job,
            owner=job,
            batch=0,
            num_batches=len(batches),
            batch_tokens=sum(map(sum, batches.values())) / len(batches),
        )
        state = state.with_job(position, rules.pace)
    while (
        stretch := next_stretch(state, lambda job, batch: lengths[job][batch], rules)
    ).ticks:
        ticks += stretch.ticks
        state = stretch.after
    microbatches = tuple(itertools.chain.from_iterable(ticks))
    return Schedule(microbatches=microbatches, limits=rules.limits)


class FixedTicks:
    """The ticks of a schedule that is made beforehand."""

    def __init__(self, schedule: Schedule, num_lanes: int = 1):
        """Starts before the first tick.

        Args:
            schedule: The schedule.
            num_lanes: Number of microbatches in a tick.
        """
        ticks = ticks_of(schedule.microbatches, num_lanes)
        rows = schedule.limits.capacity
        self._all = [StreamTick(tick=tick, rows=rows) for tick in ticks]
        self._left = deque(self._all)

    def take(self) -> StreamTick | None:
        """Returns the next tick; None after the last one."""
        return self._left.popleft() if self._left else None

    def drop(self, slot: int) -> None:
        """Takes out the job in a slot; its rows become padding."""
        for tick in self._all:
            tick.dropped.add(slot)

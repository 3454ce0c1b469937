"""Fills ticks of several lanes from the jobs of a queue, in several ways."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes, Tick, pooled
from jaxlora.scheduler.simulate import simulate
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pipeline,
    Sample,
    Schedule,
    in_order,
    padded_tokens,
)
from jaxlora.scheduler.windows.cursor import BatchCursor, BatchSource, WorkModel
from jaxlora.scheduler.windows.fill import fill_slot
from jaxlora.scheduler.windows.job_queue import JobQueue
from jaxlora.scheduler.windows.planner import Hint, JobBatches, Planner

# Parts of the lanes' capacity that ticks are planned for.
POOL_PARTS = (1.0, 0.95)
# A stream plans as many full ticks at once, and at most four times as many ticks.
_FULL_TICKS = 24
_MAX_TICKS = 4 * _FULL_TICKS
_TARGETS = (1.1, 1.0, 0.9, 0.75, 0.6)

# The microbatches of a tick, at most one for each lane. A tick without microbatches
# keeps the distance.
PartTick = list[Microbatch]


# ---- tick by tick --------------------------------------------------------------------


def queue_of(
    jobs: Iterable[JobBatches], limits: Limits, lanes: Lanes, cost: CostModel
) -> JobQueue:
    """Returns the jobs in the order in which they fill ticks.

    Args:
        jobs: The batches of each job, of which there is at least one.
        limits: Limits of a microbatch.
        lanes: The lanes.
        cost: Converts samples to work, which is what lanes are filled with.
    """
    work, queue = WorkModel.from_cost(cost), JobQueue()
    tick_tokens = lanes.tick_tokens(limits.capacity)
    for job in jobs:
        ticks = ticks_per_batch(job.batch_tokens, tick_tokens, lanes.pipeline.distance)
        queue.add(
            BatchCursor.at_start(
                BatchSource(job.batches, work, limits),
                num_batches=job.num_batches,
                urgency_per_batch=job.urgency_per_batch or ticks,
                first_urgency=job.first_urgency,
                priority=job.priority,
                is_started=job.is_started,
                ready=job.ready,
            )
        )
    return queue


def ticks_per_batch(batch_tokens: float, tick_tokens: float, distance: int) -> float:
    """Estimates the ticks from the start of a job's batch to that of its next one."""
    return max(1.0, batch_tokens / tick_tokens) + distance - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """A way to fill ticks.

    Attributes:
        target: Work to fill a lane with, as a fraction of the capacity.
        first: Parts of the target for the first ticks.
        last: Parts of the target for the last ticks, from the last one on.
    """

    target: float = 1.0
    first: tuple[float, ...] = ()
    last: tuple[float, ...] = ()


def fills(
    limits: Limits, pipeline: Pipeline, cost: CostModel, *, begins: bool, ends: bool
) -> list[Fill]:
    """Returns the ways to try.

    Args:
        limits: Limits of a microbatch.
        pipeline: The pipeline.
        cost: Times of a microbatch on one lane.
        begins: Whether the pipeline is empty before the ticks.
        ends: Whether it drains after them.
    """
    if len(cost.buckets) == 1:  # all microbatches take the same time
        return [Fill()]
    targets = [b / limits.capacity for b in cost.buckets if b <= limits.capacity]
    num = pipeline.num_stages
    ramp = tuple((i + 1) / (num + 1) for i in range(num if num > 1 else 0))
    ramps = dict.fromkeys([((), ()), (ramp if begins else (), ramp if ends else ())])
    return [
        Fill(target=target, first=first, last=last)
        for target in targets or _TARGETS
        for first, last in ramps
    ]


def fill_ticks(
    jobs: JobQueue,
    limits: Limits,
    lanes: Lanes,
    fill: Fill = Fill(),
    *,
    first_tick: int = 0,
    most_work: float = math.inf,
    work_left: float = math.inf,
) -> list[PartTick]:
    """Fills one tick after the other, lane by lane.

    Jobs in the middle of a batch come first, then the jobs that need the most ticks.

    Args:
        jobs: The jobs, which are advanced.
        limits: Limits of a microbatch.
        lanes: The lanes.
        fill: How to fill them.
        first_tick: Number of the first tick.
        most_work: Work after which no further tick begins; with it, there are at most
            `_MAX_TICKS` ticks.
        work_left: Work of all jobs, if it is to be done in these ticks.
    """
    n, distance = lanes.num_lanes, lanes.pipeline.distance
    full = fill.target * limits.capacity
    left = work_left / (n * full)
    # Until these many full ticks are left, ticks are not part of the ramp at the end.
    ends = list(zip(itertools.accumulate(fill.last), fill.last, strict=True))
    ticks: list[PartTick] = []
    most_ticks = math.inf if most_work == math.inf else _MAX_TICKS
    done = 0
    while jobs and done < most_work and len(ticks) < most_ticks:
        part = min(
            *fill.first[len(ticks) : len(ticks) + 1],
            *(end for total, end in ends if left <= total),
            1.0,
            1.0,
        )
        size = max(limits.block_tokens, int(part * full))
        tick = first_tick + len(ticks)
        filled = [fill_slot(jobs, tick, size, limits, distance) for _ in range(n)]
        work = sum(i[0] for items in filled for i in items)
        done, left = done + work, left - work / (n * full)
        ticks.append([in_order(i[2] for i in items) for items in filled if items])
    return ticks


# ---- all lanes as one ----------------------------------------------------------------


def pool(
    limits: Limits, lanes: Lanes, cost: CostModel, part: float
) -> tuple[Limits, CostModel]:
    """Returns limits and costs of one lane that is as fast as all of them.

    Args:
        limits: Limits of a microbatch.
        lanes: The lanes.
        cost: Times of a microbatch on one lane.
        part: Part of the lanes' capacity that a tick may fill. It is easier to split
            ticks that are not full.
    """
    together, pooled_cost = pooled(limits, cost, lanes.num_lanes)
    capacity = int(part * together.capacity) // limits.block_tokens
    capacity = max(limits.capacity, capacity * limits.block_tokens)
    return dataclasses.replace(together, capacity=capacity), pooled_cost


def split_ticks(
    ticks: Iterable[Sequence[Sample]], limits: Limits, num_lanes: int, cost: CostModel
) -> list[PartTick]:
    """Splits ticks that were planned as if all lanes were one.

    Samples that do not fit on the lanes of their tick run in another tick right after
    it, so that no batches come closer to each other.

    Args:
        ticks: The samples of each tick.
        limits: Limits of a microbatch.
        num_lanes: Number of lanes.
        cost: Times of a microbatch on one lane.
    """
    work, out = WorkModel.from_cost(cost), []
    for tick in ticks:
        lanes, left = _split(tick, limits, num_lanes, work)
        out.append(lanes)
        while left:
            lanes, left = _split(left, limits, num_lanes, work)
            out.append(lanes)
    return out


def _split(
    samples: Sequence[Sample], limits: Limits, num_lanes: int, work: WorkModel
) -> tuple[PartTick, list[Sample]]:
    """Gives each sample to the lane with the least work, the longest first.

    Returns:
        The microbatches, and samples that fit on no lane.

    References:
        Graham, Bounds on Multiprocessing Timing Anomalies, 1969.
    """
    lanes: list[list[Sample]] = [[] for _ in range(num_lanes)]
    works, left = [0] * num_lanes, []
    order = sorted(samples, key=lambda s: (-s.num_tokens, s.owner, s.index))
    for sample in order:
        for lane in sorted(range(num_lanes), key=works.__getitem__):
            if len(lanes[lane]) >= limits.most_samples:
                continue
            if padded_tokens([*lanes[lane], sample], limits) <= limits.capacity:
                lanes[lane].append(sample)
                works[lane] += work.item(sample)[0]
                break
        else:
            left.append(sample)
    return [in_order(lane) for lane in lanes if lane], left


# ---- whole ticks ---------------------------------------------------------------------


def finished(
    ticks: Iterable[PartTick], limits: Limits, num_lanes: int, cost: CostModel
) -> list[Tick]:
    """Makes the lanes of each tick as even as possible, and pads the ticks."""
    return list(balanced((_even(t, limits, num_lanes, cost) for t in ticks), num_lanes))


def _even(tick: PartTick, limits: Limits, num_lanes: int, cost: CostModel) -> PartTick:
    """Divides the samples of a tick evenly among its lanes, if that is better."""
    step = cost.stages[0].forward + cost.stages[0].backward
    longest = lambda lanes: max(
        (step(*cost.size(lane, limits)) for lane in lanes), default=0.0
    )
    work = WorkModel.from_cost(cost)
    lanes, left = _split(list(itertools.chain(*tick)), limits, num_lanes, work)
    return tick if left or longest(lanes) >= longest(tick) else lanes


def balanced(ticks: Iterable[Sequence[Microbatch]], num_lanes: int) -> Iterator[Tick]:
    """Pads ticks, and gives the longest microbatch to the lane with the fewest tokens.

    The microbatches of a tick may run on any lanes, so the lanes get about the same
    number of tokens in total.
    """
    totals = [0] * num_lanes
    for tick in ticks:
        tokens = [sum(s.num_tokens for s in microbatch) for microbatch in tick]
        longest_first = sorted(range(len(tick)), key=lambda i: -tokens[i])
        out: list[Microbatch] = [()] * num_lanes
        least_first = sorted(range(num_lanes), key=lambda lane: totals[lane])
        for i, lane in zip(longest_first, least_first, strict=False):
            out[lane] = tick[i]
            totals[lane] += tokens[i]
        yield tuple(out)


# ---- the next ticks of a stream ------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaneWindow:
    """The next ticks of a stream, planned in one way.

    Attributes:
        ticks: The ticks.
        is_done: Whether no job has work left after them.
        hint: What planning them has found.
    """

    ticks: list[Tick]
    is_done: bool
    hint: Hint


def next_window(
    jobs: Callable[[], Iterable[JobBatches]],
    limits: Limits,
    lanes: Lanes,
    cost: CostModel,
    *,
    first_tick: int = 0,
    before: Sequence[Tick] = (),
    hint: Hint,
) -> LaneWindow:
    """Plans the next ticks in several ways; returns those that do their work first.

    Args:
        jobs: Returns the batches of each job, from the start at each call.
        limits: Limits of a microbatch.
        lanes: The lanes.
        cost: Times of a microbatch on one lane.
        first_tick: Number of the first tick.
        before: The ticks before it that share the pipeline with it, whose samples are
            not of these jobs.
        hint: What planning the ticks before it has found.
    """
    n, pipeline = lanes.num_lanes, lanes.pipeline
    queue, left = queue_of(jobs(), limits, lanes, cost), _work_left(jobs, limits, n)
    begins = not any(map(any, before))
    windows = []
    for fill in fills(limits, pipeline, cost, begins=begins, ends=left < math.inf):
        own = queue.copy()
        ticks = fill_ticks(
            *(own, limits, lanes, fill),
            first_tick=first_tick,
            most_work=_FULL_TICKS * n * limits.capacity,
            work_left=left,
        )
        ticks = finished(ticks, limits, n, cost)
        windows.append(LaneWindow(ticks=ticks, is_done=not own, hint=hint))
    for part in POOL_PARTS:
        together, pooled_cost = pool(limits, lanes, cost, part)
        planner = Planner(
            *(together, pipeline, pooled_cost),
            first_slot=first_tick,
            before=[tuple(itertools.chain(*tick)) for tick in before],
            hint=hint,
        )
        for job in jobs():
            planner.add(job)
        ticks = split_ticks(planner.next_window(), limits, n, cost)
        ticks = finished(ticks, limits, n, cost)
        windows.append(
            LaneWindow(ticks=ticks, is_done=planner.is_done, hint=planner.hint)
        )
    return _fastest(windows, before, limits, lanes, cost)


def _work_left(
    jobs: Callable[[], Iterable[JobBatches]], limits: Limits, num_lanes: int
) -> float:
    """Returns the tokens of all jobs if a window may do them all; else infinity."""
    most = _FULL_TICKS * num_lanes * limits.capacity
    if sum(job.num_batches * job.batch_tokens for job in jobs()) > most:
        return math.inf
    return sum(s.num_tokens for job in jobs() for batch in job.batches for s in batch)


def _fastest(
    windows: Sequence[LaneWindow],
    before: Sequence[Tick],
    limits: Limits,
    lanes: Lanes,
    cost: CostModel,
) -> LaneWindow:
    """Returns the window that is the first to finish the work common to all."""
    works, times = [], []
    for window in windows:
        tokens = [sum(s.num_tokens for m in t for s in m) for t in window.ticks]
        works.append(np.cumsum(tokens))
        ticks = itertools.chain(*before, *window.ticks)
        run = simulate(
            Schedule(microbatches=tuple(ticks), limits=limits),
            *(cost, lanes.pipeline),
            num_lanes=lanes.num_lanes,
        )
        # A tick is done when the first stage has run it backward.
        times.append(run.backward_end[0, len(before) :])
    common = min(work[-1] for work in works)
    time = lambda i: float(np.interp(common, works[i], times[i]))
    return windows[min(range(len(windows)), key=time)]

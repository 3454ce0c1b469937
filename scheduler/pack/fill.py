"""Fills ticks with samples of the jobs of a queue, one tick after the other."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes, Tick
from jaxlora.scheduler.pack.jobs import Item, JobQueue, WorkModel
from jaxlora.scheduler.pack.ramps import Ramps
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Sample,
    in_order,
    padded_tokens,
)

_MAX_SUBSETS = 6
# Jobs that are looked at to fill a microbatch, at most.
_MAX_JOBS = 64

# The microbatches of a tick, at most one for each lane. A tick without microbatches
# keeps the distance.
PartTick = list[Microbatch]


# ---- tick by tick --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """A way to fill ticks.

    Attributes:
        target: Work to fill a lane with, as a fraction of the capacity.
        first: Parts of the target for the first ticks.
        last: Parts of the target for the last ticks, from the last one backwards.
    """

    target: float = 1.0
    first: tuple[float, ...] = ()
    last: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ahead:
    """The surroundings of the ticks to plan.

    Attributes:
        first_tick: Number of the first of them.
        before: The ticks before it that share the pipeline with it. Their samples do
            not belong to the jobs to plan.
        most_work: Work after which no further tick begins; infinity: everything is
            planned.
        most_ticks: Number of ticks after which no further one begins.
        work_left: Work of all jobs; infinity if it is more than `most_work`.
    """

    first_tick: int = 0
    before: Sequence[Tick] = ()
    most_work: float = math.inf
    most_ticks: float = math.inf
    work_left: float = math.inf


def fill_ticks(
    jobs: JobQueue,
    limits: Limits,
    lanes: Lanes,
    fill: Fill = Fill(),
    ahead: Ahead = Ahead(),
    ramps: Ramps | None = None,
) -> list[PartTick]:
    """Fills one tick after the other, lane by lane, and advances the jobs.

    Jobs in the middle of a batch come first, then the most urgent ones. With `ramps`,
    there is one lane, and a batch that runs alone is split by them.
    """
    n, distance = lanes.num_lanes, lanes.pipeline.distance
    full = fill.target * limits.capacity
    left = ahead.work_left / (n * full)
    # Until these many full ticks are left, ticks are not part of the ramp at the end.
    ends = list(zip(itertools.accumulate(fill.last), fill.last, strict=True))
    ticks: list[PartTick] = []
    done = 0
    while jobs and done < ahead.most_work and len(ticks) < ahead.most_ticks:
        tick = ahead.first_tick + len(ticks)
        if ramps is not None and (index := jobs.alone) is not None:
            items = jobs[index].items
            ticks += [[] for _ in range(tick, jobs[index].ready)]
            ticks += [[in_order(items[i][2] for i in p)] for p in ramps.split(items)]
            end = ahead.first_tick + len(ticks) - 1
            jobs.take(index, range(len(items)), end, distance)
            work = sum(item[0] for item in items)
        else:
            part = min(
                *fill.first[len(ticks) : len(ticks) + 1],
                *(end for total, end in ends if left <= total),
                1.0,
                1.0,
            )
            size = max(limits.block_tokens, int(part * full))
            filled = [fill_slot(jobs, tick, size, limits, distance) for _ in range(n)]
            work = sum(i[0] for items in filled for i in items)
            ticks.append([in_order(i[2] for i in items) for items in filled if items])
        done, left = done + work, left - work / (n * full)
    return ticks


# ---- one microbatch ------------------------------------------------------------------


def fill_slot(
    jobs: JobQueue, tick: int, target: int, limits: Limits, distance: int
) -> list[Item]:
    """Fills a microbatch of a tick with up to about `target` work.

    Jobs in the middle of a batch come first, then the most urgent ones.

    Args:
        jobs: The jobs, which are advanced.
        tick: Number of the tick.
        target: Work to fill the microbatch with. A first item is placed even if it
            exceeds the target.
        limits: Capacity and block size.
        distance: Distance of the pipeline.

    Returns:
        The items of the microbatch; none if no job may run in this tick.
    """
    out: list[Item] = []
    work, tokens, num_jobs = 0, 0, 0
    for index in jobs.first(tick, _MAX_JOBS):
        room, token_room = target - work, limits.capacity - tokens
        if out and min(room, token_room) < limits.block_tokens:
            break  # the part of a job takes at least one block
        if num_jobs == limits.most_jobs:
            break
        items = jobs[index].items
        if limits.max_samples is not None:
            items = items[: limits.max_samples - len(out)]
            if not items:
                break
        if out and items[-1][0] > room:
            continue  # not even the job's smallest item fits
        chosen = _choose(items, room, token_room, limits, must_choose=not out)
        if chosen:
            jobs.take(index, chosen, tick, distance)
            taken = [items[i] for i in chosen]
            real = sum(i[1] for i in taken)
            tokens += limits.padded(real)
            work += sum(i[0] for i in taken) + limits.padded(real) - real
            num_jobs += 1
            out += taken
    return out


def _choose(
    items: list[Item], room: int, token_room: int, limits: Limits, *, must_choose: bool
) -> list[int]:
    """Chooses the items of one job for a microbatch, by their indices.

    The rooms are the work and the tokens that the items may add, padding included.

    Returns:
        Indices of the items.
    """

    def fits(chosen: Sequence[int]) -> bool:
        tokens = work = 0
        for i in chosen:
            work += items[i][0]
            tokens += items[i][1]
        padded = limits.padded(tokens)
        return padded <= token_room and work + padded - tokens <= room

    everything = range(len(items))
    if fits(everything):
        return list(everything)
    weights = [i[0] for i in items]
    for chosen in itertools.islice(best_subsets(weights, room), _MAX_SUBSETS):
        if fits(chosen):
            return chosen
    # Padding to blocks may make even the heaviest subset too large. A subset that is
    # lighter by a block always fits.
    weights = [i[1] for i in items] if room > token_room else weights
    subsets = best_subsets(weights, min(token_room, room - limits.block_tokens + 1))
    chosen = next(subsets, [])
    if not chosen and must_choose:
        # Every sample exceeds the target, so the microbatch is a single sample.
        return [0]
    return chosen


def best_subsets(weights: Sequence[int], room: int) -> Iterator[list[int]]:
    """Yields subsets of items whose total weight is at most `room`, the heaviest first.

    Subset sum is solved exactly with bit sets: bit w of an integer is 1 if some subset
    has the total weight w.

    There is one nonempty subset, as indices, for each total weight. Among equal totals,
    early items are preferred. Callers sort the items by descending weight, because
    small items are easier to place later.
    """
    if room <= 0:
        return
    mask = (1 << (room + 1)) - 1
    reach = [1]
    for weight in weights:
        reach.append((reach[-1] | reach[-1] << weight) & mask)
        if reach[-1] >> room:  # a subset fills the room, so no item can improve it
            break
    sums = reach[-1]
    while True:
        total = sums.bit_length() - 1
        if total <= 0:
            return
        yield _backtrack(weights, reach, total)
        sums ^= 1 << total


def _backtrack(weights: Sequence[int], reach: list[int], total: int) -> list[int]:
    chosen = []
    for i in range(len(reach) - 2, -1, -1):
        if not total:
            break
        if not reach[i] >> total & 1:  # the total is impossible without item i
            chosen.append(i)
            total -= weights[i]
    return chosen


# ---- whole ticks ---------------------------------------------------------------------


def split_ticks(
    ticks: Iterable[Sequence[Sample]], limits: Limits, num_lanes: int, cost: CostModel
) -> list[PartTick]:
    """Splits ticks that were planned as if all lanes were one.

    Samples that do not fit on the lanes of their tick run in another tick right after
    it, so that no batches come closer to each other.
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
            if len({s.owner for s in [*lanes[lane], sample]}) > limits.most_jobs:
                continue
            if padded_tokens([*lanes[lane], sample], limits) <= limits.capacity:
                lanes[lane].append(sample)
                works[lane] += work.item(sample)[0]
                break
        else:
            left.append(sample)
    return [in_order(lane) for lane in lanes if lane], left


def evened(tick: PartTick, limits: Limits, num_lanes: int, cost: CostModel) -> PartTick:
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

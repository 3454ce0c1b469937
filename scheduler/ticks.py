"""Packs samples into ticks: one microbatch for each lane, run at the same time.

`lanes.py` defines both words.

Two batches of a job never share a tick, as the second one needs the weights after the
first. So a tick can only be full if its jobs have enough samples in one batch each.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from jaxlora.scheduler import joint
from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.cursor import BatchCursor, BatchSource, WorkModel
from jaxlora.scheduler.fill import fill_slot
from jaxlora.scheduler.job_queue import JobQueue
from jaxlora.scheduler.lanes import Lanes, Tick, pooled
from jaxlora.scheduler.packers import PackerName, get_packer
from jaxlora.scheduler.simulate import simulate
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pipeline,
    Sample,
    Schedule,
    check_fits,
    in_order,
    padded_tokens,
)

# Parts of the lanes' capacity that ticks are planned for.
_POOL_PARTS = (1.0, 0.95)
_TARGETS = (1.1, 1.0, 0.9, 0.75, 0.6)


def pack_ticks(
    samples: Sequence[Sample],
    limits: Limits,
    packer: PackerName,
    lanes: Lanes,
    cost: CostModel,
) -> Schedule:
    """Packs samples into ticks.

    With one lane, this is the packer's own schedule. With more lanes, `joint` fills one
    tick after the other, and the microbatches of the other packers are arranged in
    ticks. If jobs are pinned to replicas, each replica is packed on its own.

    Args:
        samples: The samples. If jobs are pinned, they name their job by its slot.
        limits: Limits of a microbatch.
        packer: Name of the packer.
        lanes: The lanes.
        cost: Times of a microbatch on one lane.

    Returns:
        A schedule whose number of microbatches is a multiple of the number of lanes.

    Raises:
        ValueError: A sample is longer than the capacity, or the cost model and the
            pipeline differ in the number of stages.
    """
    if lanes.pinned:
        return _pack_replicas(samples, limits, packer, lanes, cost)
    n, pipeline = lanes.num_lanes, lanes.pipeline
    if n == 1:
        return get_packer(packer)(samples, limits, pipeline, cost)
    check_fits(samples, limits)
    if packer == "joint":
        return _shortest(samples, limits, lanes, cost)
    else:
        # If batches of a job are this far apart, no two of them need to share a tick.
        apart = Pipeline(num_stages=pipeline.num_stages, distance=n * pipeline.distance)
        packed = get_packer(packer)(samples, limits, apart, cost)
        ticks = arrange(packed.microbatches, n, pipeline.distance)
    microbatches = itertools.chain.from_iterable(balanced(ticks, n))
    return Schedule(microbatches=tuple(microbatches), limits=limits)


def _shortest(
    samples: Sequence[Sample], limits: Limits, lanes: Lanes, cost: CostModel
) -> Schedule:
    """Packs jointly in several ways, and returns the schedule with the shortest run."""
    n, pipeline = lanes.num_lanes, lanes.pipeline
    targets, ramps = _TARGETS, list(dict.fromkeys([(), _ramp(pipeline)]))
    if len(cost.buckets) == 1:  # all microbatches take the same time
        targets, ramps = (1.0,), [()]
    ways = [
        fill_ticks(samples, limits, cost, n, pipeline.distance, target, ramp)
        for target, ramp in itertools.product(targets, ramps)
    ]
    for part in _POOL_PARTS:
        ways.append(split_ticks(samples, limits, cost, n, pipeline, part))
    schedules = []
    for ticks in ways:
        even = (_even(tick, limits, n, cost) for tick in ticks)
        microbatches = itertools.chain.from_iterable(balanced(even, n))
        schedules.append(Schedule(microbatches=tuple(microbatches), limits=limits))
    time = lambda s: simulate(s, cost, pipeline, num_lanes=n).makespan
    return min(schedules, key=time)


def _ramp(pipeline: Pipeline) -> tuple[float, ...]:
    """Returns by how much the first ticks are filled, and in reverse the last ones."""
    num = pipeline.num_stages
    return tuple((i + 1) / (num + 1) for i in range(num if num > 1 else 0))


def _even(
    tick: list[Microbatch], limits: Limits, num_lanes: int, cost: CostModel
) -> list[Microbatch]:
    """Divides the samples of a tick evenly among its lanes, if that is better."""
    step = cost.stages[0].forward + cost.stages[0].backward
    longest = lambda lanes: max(
        (step(*cost.size(lane, limits)) for lane in lanes), default=0.0
    )
    work = WorkModel.from_cost(cost)
    lanes, left = _split(list(itertools.chain(*tick)), limits, num_lanes, work)
    return tick if left or longest(lanes) >= longest(tick) else lanes


def split_ticks(
    samples: Sequence[Sample],
    limits: Limits,
    cost: CostModel,
    num_lanes: int,
    pipeline: Pipeline,
    part: float,
) -> list[list[Microbatch]]:
    """Plans ticks as if all lanes were one, and splits each tick among the lanes.

    Samples that do not fit on the lanes of their tick run in another tick right after
    it, so that no batches come closer to each other.

    Args:
        samples: Any number of global batches of any number of jobs.
        limits: Limits of a microbatch.
        cost: Times of a microbatch on one lane.
        num_lanes: Number of lanes.
        pipeline: Stages, and distance between the batches of a job, in ticks.
        part: Part of the lanes' capacity that a tick may fill. It is easier to split
            ticks that are not full.

    Returns:
        The microbatches of each tick; see `fill_ticks`.
    """
    together, pooled_cost = pooled(limits, cost, num_lanes)
    capacity = int(part * together.capacity) // limits.block_tokens
    capacity = max(limits.capacity, capacity * limits.block_tokens)
    together = dataclasses.replace(together, capacity=capacity)
    work = WorkModel.from_cost(cost)
    ticks: list[list[Microbatch]] = []
    for tick in joint.pack(samples, together, pipeline, pooled_cost).microbatches:
        lanes, left = _split(tick, limits, num_lanes, work)
        ticks.append(lanes)
        while left:
            lanes, left = _split(left, limits, num_lanes, work)
            ticks.append(lanes)
    return ticks


def _split(
    samples: Sequence[Sample], limits: Limits, num_lanes: int, work: WorkModel
) -> tuple[list[Microbatch], list[Sample]]:
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
            if padded_tokens([*lanes[lane], sample], limits) <= limits.capacity:
                lanes[lane].append(sample)
                works[lane] += work.item(sample)[0]
                break
        else:
            left.append(sample)
    return [in_order(lane) for lane in lanes if lane], left


def _pack_replicas(
    samples: Sequence[Sample],
    limits: Limits,
    packer: PackerName,
    lanes: Lanes,
    cost: CostModel,
) -> Schedule:
    """Packs the jobs of each replica on their own; ticks then run side by side."""
    one = lanes.one_replica()
    of_replica: list[list[Sample]] = [[] for _ in range(lanes.data)]
    for sample in samples:
        of_replica[lanes.replica(sample.owner)].append(sample)
    packed = [pack_ticks(s, limits, packer, one, cost).microbatches for s in of_replica]
    num = max(map(len, packed))
    padded = [p + ((),) * (num - len(p)) for p in packed]
    microbatches = [
        microbatch
        for first in range(0, num, lanes.fsdp)
        for p in padded
        for microbatch in p[first : first + lanes.fsdp]
    ]
    return Schedule(microbatches=tuple(microbatches), limits=limits)


def fill_ticks(
    samples: Sequence[Sample],
    limits: Limits,
    cost: CostModel,
    num_lanes: int,
    distance: int,
    target: float = 1.0,
    ramp: Sequence[float] = (),
) -> list[list[Microbatch]]:
    """Fills one tick after the other, lane by lane.

    Jobs in the middle of a batch come first, then the jobs that need the most ticks.

    Args:
        samples: Any number of global batches of any number of jobs.
        limits: Limits of a microbatch.
        cost: Converts samples to work, which is what lanes are filled with.
        num_lanes: Number of lanes.
        distance: Distance between the batches of a job, in ticks.
        target: Work to fill a lane with, as a fraction of the capacity.
        ramp: Parts of the target for the first ticks, and in reverse for the last.

    Returns:
        The microbatches of each tick, at most `num_lanes`. A tick without microbatches
        keeps the distance.
    """
    work = WorkModel.from_cost(cost)
    jobs = JobQueue()
    for job in joint.job_batches(samples):
        cursor = BatchCursor.at_start(
            BatchSource(job.batches, work, limits),
            num_batches=job.num_batches,
            slots_per_batch=ticks_per_batch(
                job.batch_tokens, num_lanes * limits.capacity, distance
            ),
        )
        jobs.add(cursor)
    ticks: list[list[Microbatch]] = []
    full = target * limits.capacity
    left = sum(work.item(sample)[0] for sample in samples) / (num_lanes * full)
    # Until these many full ticks are left, ticks are not part of the ramp at the end.
    ends = list(zip(itertools.accumulate(ramp), ramp, strict=True))
    while jobs:
        part = min(
            *ramp[len(ticks) : len(ticks) + 1],
            *(end for total, end in ends if left <= total),
            1.0,
            1.0,
        )
        size = max(limits.block_tokens, int(part * full))
        lanes = [
            fill_slot(jobs, len(ticks), size, limits, distance)
            for _ in range(num_lanes)
        ]
        left -= sum(i[0] for items in lanes for i in items) / (num_lanes * full)
        ticks.append([in_order(i[2] for i in items) for items in lanes if items])
    return ticks


def ticks_per_batch(batch_tokens: float, tick_tokens: int, distance: int) -> float:
    """Estimates the ticks from the start of a job's batch to that of its next one."""
    return max(1.0, batch_tokens / tick_tokens) + distance - 1


def arrange(
    microbatches: Sequence[Microbatch], num_lanes: int, distance: int
) -> list[list[Microbatch]]:
    """Arranges microbatches in ticks by list scheduling.

    A microbatch waits until all earlier batches of its jobs are `distance` ticks old.
    Those on which the longest chain of others waits come first, then the earlier ones.

    Args:
        microbatches: The microbatches, in an order in which they could run one by one.
            No-ops are dropped.
        num_lanes: Number of lanes.
        distance: Distance between the batches of a job, in ticks.

    Returns:
        The microbatches of each tick; see `fill_ticks`.

    References:
        Graham, Bounds on Multiprocessing Timing Anomalies, 1969.
    """
    real = [m for m in microbatches if m]
    following = _following(real)
    num_before = [0] * len(real)
    chain = [1] * len(real)  # ticks from the start of a microbatch to the end
    for i in reversed(range(len(real))):
        for j in following[i]:
            num_before[j] += 1
            chain[i] = max(chain[i], distance + chain[j])
    ready = {i: 0 for i in range(len(real)) if not num_before[i]}
    earliest = [0] * len(real)
    ticks: list[list[Microbatch]] = []
    while ready:
        tick = len(ticks)
        runnable = sorted(
            (i for i, first in ready.items() if first <= tick),
            key=lambda i: (-chain[i], i),
        )[:num_lanes]
        for i in runnable:
            del ready[i]
            for j in following[i]:
                num_before[j] -= 1
                earliest[j] = tick + distance
                if not num_before[j]:
                    ready[j] = earliest[j]
        ticks.append([real[i] for i in runnable])
    return ticks


def _following(microbatches: Sequence[Microbatch]) -> list[set[int]]:
    """Returns the microbatches that hold a next batch of a job of each microbatch."""
    holders: dict[tuple[int, int], list[int]] = {}
    for i, microbatch in enumerate(microbatches):
        for key in {(s.owner, s.batch) for s in microbatch}:
            holders.setdefault(key, []).append(i)
    out: list[set[int]] = [set() for _ in microbatches]
    for key, next_key in itertools.pairwise(sorted(holders)):
        if key[0] == next_key[0]:
            for i in holders[key]:
                out[i].update(holders[next_key])
    return out


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

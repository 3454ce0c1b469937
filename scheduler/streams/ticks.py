"""Packs samples into ticks: one microbatch for each lane, run at the same time.

`lanes.py` defines both words.

Two batches of a job never share a tick, as the second one needs the weights after the
first. So a tick can only be full if its jobs have enough samples in one batch each.
"""

import itertools
from collections.abc import Sequence

from jaxlora.scheduler.algorithms import joint, rounds
from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes
from jaxlora.scheduler.packers import PackerName, get_packer
from jaxlora.scheduler.simulate import simulate
from jaxlora.scheduler.streams.lane_fill import (
    POOL_PARTS,
    balanced,
    fill_ticks,
    fills,
    finished,
    pool,
    queue_of,
    split_ticks,
)
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pipeline,
    Sample,
    Schedule,
    check_fits,
)
from jaxlora.scheduler.windows.cursor import WorkModel


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
    ticks.

    Args:
        samples: The samples.
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
    n, pipeline = lanes.num_lanes, lanes.pipeline
    if n == 1:
        return get_packer(packer)(samples, limits, pipeline, cost)
    check_fits(samples, limits)
    if packer == "joint":
        return pack_lanes(samples, limits, lanes, cost)
    else:
        # If batches of a job are this far apart, no two of them need to share a tick.
        apart = Pipeline(num_stages=pipeline.num_stages, distance=n * pipeline.distance)
        packed = get_packer(packer)(samples, limits, apart, cost)
        ticks = arrange(packed.microbatches, n, pipeline.distance)
    microbatches = itertools.chain.from_iterable(balanced(ticks, n))
    return Schedule(microbatches=tuple(microbatches), limits=limits)


def pack_lanes(
    samples: Sequence[Sample], limits: Limits, lanes: Lanes, cost: CostModel
) -> Schedule:
    """Packs jointly in several ways, and returns the schedule with the shortest run.

    Args:
        samples: The samples.
        limits: Limits of a microbatch.
        lanes: The lanes, of which there are several.
        cost: Times of a microbatch on one lane.
    """
    n, pipeline = lanes.num_lanes, lanes.pipeline
    queue = queue_of(joint.job_batches(samples), limits, lanes, cost)
    work = WorkModel.from_cost(cost)
    total = sum(work.item(sample)[0] for sample in samples)
    ways = [
        fill_ticks(queue.copy(), limits, lanes, fill, work_left=total)
        for fill in fills(limits, pipeline, cost, begins=True, ends=True)
    ]
    for part in POOL_PARTS:
        together, pooled_cost = pool(limits, lanes, cost, part)
        packed = joint.pack(samples, together, pipeline, pooled_cost)
        ways.append(split_ticks(packed.microbatches, limits, n, cost))
    if (in_rounds := rounds.pack(samples, limits, lanes, cost)) is not None:
        ways.append(in_rounds)
    schedules = []
    for ticks in ways:
        microbatches = itertools.chain.from_iterable(finished(ticks, limits, n, cost))
        schedules.append(Schedule(microbatches=tuple(microbatches), limits=limits))
    time = lambda s: simulate(s, cost, pipeline, num_lanes=n).makespan
    return min(schedules, key=time)


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

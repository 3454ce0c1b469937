"""The default packer, which plans all global batches of all jobs together.

Ticks are filled in several ways, and the best are polished. Some kinds of jobs have
better plans of their own: bridges, rounds, or the orders of other packers.
"""

import itertools
from collections.abc import Iterable, Sequence

from jaxlora.scheduler.bounds import lower_bound
from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes, Tick, pooled
from jaxlora.scheduler.pack import bridges, rounds
from jaxlora.scheduler.pack.fill import Ahead, balanced, evened, split_ticks
from jaxlora.scheduler.pack.jobs import JobQueue, WorkModel, job_batches
from jaxlora.scheduler.pack.polish import polished
from jaxlora.scheduler.pack.ways import (
    drains,
    plan_many_ticks,
    plan_ticks,
    polishes,
)
from jaxlora.scheduler.papers import greedy, mlora
from jaxlora.scheduler.simulate import check_stages, simulate
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pipeline,
    Sample,
    Schedule,
    check_fits,
)

# Plans of more samples are not polished, and those of more samples or jobs are not
# compared with other orders.
_FEW_SAMPLES = 1024
_FEW_JOBS = 64
# Other orders are only tried if a plan exceeds the bound by more than this.
_SMALL_GAP = 0.01


def pack(
    samples: Sequence[Sample],
    limits: Limits,
    pipeline: Pipeline,
    cost: CostModel,
    *,
    num_lanes: int = 1,
) -> Schedule:
    """Packs any number of global batches of any number of jobs.

    Args:
        samples: The samples, in any order. The batches of a job may differ in size, and
            jobs may differ in their number of batches.
        limits: Capacity and block size.
        pipeline: Provides the distance between the batches of a job, in ticks.
        cost: Times of a microbatch on one lane.
        num_lanes: Number of microbatches in a tick.

    Returns:
        A schedule whose number of microbatches is a multiple of the number of lanes.

    Raises:
        ValueError: A sample is longer than the capacity, or the cost model and the
            pipeline differ in the number of stages.
    """
    check_stages(cost, pipeline)
    check_fits(samples, limits)
    if not samples:
        return Schedule(microbatches=(), limits=limits)
    lanes, work = Lanes(data=num_lanes, pipeline=pipeline), WorkModel.from_cost(cost)
    queue = JobQueue.of(job_batches(samples), limits, lanes, cost)
    if len(samples) > _FEW_SAMPLES:
        return _schedule(plan_many_ticks(queue, limits, lanes, cost), limits)
    ahead = Ahead(work_left=sum(work.item(sample)[0] for sample in samples))
    ticks = plan_ticks(queue, limits, lanes, cost, ahead, everywhere=True)
    best = _schedule(ticks, limits)
    if len({s.owner for s in samples}) > _FEW_JOBS:
        return best
    time = lambda s: simulate(s, cost, pipeline, num_lanes=num_lanes).makespan
    bound = lower_bound(samples, limits, pipeline, cost, num_lanes=num_lanes)
    if bound.gap(time(best)) <= _SMALL_GAP:
        return best
    return min([best, *_others(samples, limits, lanes, cost)], key=time)


def _others(
    samples: Sequence[Sample], limits: Limits, lanes: Lanes, cost: CostModel
) -> list[Schedule]:
    """Returns plans of other kinds, one of which may be better for a few jobs.

    Packing by rounds and mLoRA's order are sometimes better where batches are tiny, and
    bridges where one job has most of the work.
    """
    n, pipeline = lanes.num_lanes, lanes.pipeline
    apart = far_apart(pipeline, n)
    orders = (
        greedy.by_rounds(samples, limits, apart),
        mlora.pack(samples, limits, apart),
    )
    plans = [
        arrange(one.microbatches, n, pipeline.distance)
        for one in orders
        if one.keeps_numbers
    ]
    special = [rounds.pack(samples, limits, lanes, cost)]
    if drains(pipeline, cost):
        pooled_limits, pooled_cost = pooled(limits, cost, n)
        bridged = bridges.pack(samples, pooled_limits, pipeline, pooled_cost)
        if bridged is not None:
            special.append(split_ticks(bridged, limits, n, cost))
    for ticks in special:
        if ticks is not None:
            plans.append(ticks)
            if polishes(lanes, cost):
                plans.append(polished(ticks, limits, lanes, cost))
    return [
        _schedule(balanced((evened(t, limits, n, cost) for t in plan), n), limits)
        for plan in plans
    ]


def _schedule(ticks: Iterable[Tick], limits: Limits) -> Schedule:
    return Schedule(microbatches=tuple(itertools.chain(*ticks)), limits=limits)


# ---- microbatches of packers for one lane --------------------------------------------


def far_apart(pipeline: Pipeline, num_lanes: int) -> Pipeline:
    """Returns a pipeline in which no two batches of a job need to share a tick.

    Its distance is in microbatches, and that of the given one in ticks.
    """
    distance = num_lanes * pipeline.distance
    return Pipeline(num_stages=pipeline.num_stages, distance=distance)


def arrange(
    microbatches: Sequence[Microbatch], num_lanes: int, distance: int
) -> list[list[Microbatch]]:
    """Arranges microbatches, which could run one by one, in ticks by list scheduling.

    A microbatch waits until all earlier batches of its jobs are `distance` ticks old.
    Those with the longest chain of others waiting for them come first, then the earlier
    ones. No-ops are dropped.

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

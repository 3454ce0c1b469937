"""Plans the next ticks in several ways, and polishes the best of them."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes, Tick, pooled
from jaxlora.scheduler.pack.fill import (
    Ahead,
    Fill,
    PartTick,
    balanced,
    evened,
    fill_ticks,
    split_ticks,
)
from jaxlora.scheduler.pack.jobs import JobQueue
from jaxlora.scheduler.pack.polish import polished
from jaxlora.scheduler.pack.ramps import Ramps
from jaxlora.scheduler.simulate import simulate
from jaxlora.scheduler.types import Limits, Pipeline, Schedule

_TARGETS = (1.1, 1.0, 0.9, 0.75, 0.6)  # of fillings, without buckets
# Parts of the capacity of all lanes together that ticks are planned for. It is easier
# to split ticks that are not full.
_POOL_PARTS = (1.0, 0.95)
# Fillings that are polished.
_NUM_POLISHED = 2
# Polishing the ticks of more lanes takes too long.
_MAX_POLISHED_LANES = 8
# Full ticks by which the way to plan many is chosen.
_FIRST_TICKS = 96


def drains(pipeline: Pipeline, cost: CostModel) -> bool:
    """Whether the sizes of microbatches matter where a pipeline fills and drains.

    Nothing drains between two batches with a distance below the number of stages.
    """
    return 1 < pipeline.num_stages <= pipeline.distance and not cost.is_flat


def polishes(lanes: Lanes, cost: CostModel) -> bool:
    """Whether ticks are polished."""
    few = lanes.num_lanes <= _MAX_POLISHED_LANES
    return few and drains(lanes.pipeline, cost)


# Planned ticks, and the ticks after them, which only serve to judge and polish them.
_Plan = tuple[list[PartTick], list[PartTick]]


def plan_ticks(
    queue: JobQueue,
    limits: Limits,
    lanes: Lanes,
    cost: CostModel,
    ahead: Ahead,
    *,
    everywhere: bool = False,
) -> list[Tick]:
    """Plans ticks in several ways, and returns the plan that does the work first.

    The queue stays as it is. Polishing is for all ticks if `everywhere`, and otherwise
    for those where the pipeline fills and drains.
    """
    args = limits, lanes, cost
    plans = [way.plan(queue.copy(), *args, ahead) for way in _ways(*args, ahead)]
    if polishes(lanes, cost):
        waits = {job: tick - ahead.first_tick for job, tick in queue.ready().items()}
        for i in _ranked(plans, *args, ahead.before)[:_NUM_POLISHED]:
            ticks, behind = plans[i]
            better = polished(
                *(ticks, *args),
                before=ahead.before,
                after=behind,
                earliest={job: wait for job, wait in waits.items() if wait > 0},
                everywhere=everywhere,
            )
            plans.append((better, behind))
    best, _ = plans[_ranked(plans, *args, ahead.before)[0]]
    return list(balanced(best, lanes.num_lanes))


def plan_many_ticks(
    queue: JobQueue, limits: Limits, lanes: Lanes, cost: CostModel
) -> list[Tick]:
    """Plans all ticks in the way that is the best for the first ones.

    This takes less time than `plan_ticks`, whose plans are better.
    """
    args = limits, lanes, cost
    work = _FIRST_TICKS * lanes.num_lanes * limits.capacity
    ahead = Ahead(most_work=work, most_ticks=4 * _FIRST_TICKS)
    ways = _ways(*args, ahead)
    plans = [way.plan(queue.copy(), *args, ahead) for way in ways]
    ticks, _ = ways[_ranked(plans, *args, ())[0]].plan(queue, *args, Ahead())
    return list(balanced(ticks, lanes.num_lanes))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Way:
    """A way to plan ticks.

    Attributes:
        fill: How to fill them.
        limits: Limits of a microbatch, or of one that fills all lanes together.
        lanes: The lanes, or one lane in place of all of them.
        ramps: Splits batches that run alone.
    """

    fill: Fill
    limits: Limits
    lanes: Lanes
    ramps: Ramps | None

    def plan(
        self,
        queue: JobQueue,
        limits: Limits,
        lanes: Lanes,
        cost: CostModel,
        ahead: Ahead,
    ) -> _Plan:
        """Plans ticks of a queue, which is advanced."""
        args, n = (queue, self.limits, self.lanes), lanes.num_lanes
        ticks = fill_ticks(*args, self.fill, ahead, self.ramps)
        behind: list[PartTick] = []
        if queue and drains(lanes.pipeline, cost):
            first, most = ahead.first_tick + len(ticks), lanes.pipeline.num_stages
            later = Ahead(first_tick=first, most_ticks=most)
            plain = Fill(target=self.fill.target)
            behind = fill_ticks(*args, plain, later, self.ramps)
        both = []
        for some in (ticks, behind):
            if self.lanes.num_lanes < n:
                together = (list(itertools.chain(*tick)) for tick in some)
                some = split_ticks(together, limits, n, cost)
            both.append([evened(tick, limits, n, cost) for tick in some])
        return both[0], both[1]


def _ways(limits: Limits, lanes: Lanes, cost: CostModel, ahead: Ahead) -> list[_Way]:
    n, pipeline = lanes.num_lanes, lanes.pipeline
    grounds = [(limits, lanes, cost)]
    for part in _POOL_PARTS if n > 1 and not cost.is_flat else ():
        pooled_limits, pooled_cost = pooled(limits, cost, n, part)
        grounds.append((pooled_limits, Lanes(pipeline=pipeline), pooled_cost))
    # The ways with smaller ticks where the pipeline is empty before, or drains after.
    begins, ends = not any(map(any, ahead.before)), ahead.work_left < math.inf
    num = pipeline.num_stages if pipeline.num_stages > 1 else 0
    ramp = tuple((i + 1) / (num + 1) for i in range(num))
    shapes = dict.fromkeys([((), ()), (ramp * begins, ramp * ends)])
    out = []
    for own_limits, own_lanes, own_cost in grounds:
        ramps = None
        if own_lanes.num_lanes == 1 and drains(pipeline, own_cost):
            ramps = Ramps(own_limits, pipeline, own_cost)
        capacity = own_limits.capacity
        targets = [b / capacity for b in own_cost.buckets if b <= capacity]
        fills = [
            Fill(target=target, first=first, last=last)
            for target in targets or _TARGETS
            for first, last in shapes
        ]
        for fill in [Fill()] if cost.is_flat else fills:
            out.append(_Way(fill=fill, limits=own_limits, lanes=own_lanes, ramps=ramps))
    return out


def _ranked(
    plans: Sequence[_Plan],
    limits: Limits,
    lanes: Lanes,
    cost: CostModel,
    before: Sequence[Tick],
) -> list[int]:
    """Returns the indices of plans; the first to finish the common work leads."""
    n, works, times = lanes.num_lanes, [], []
    for ticks, behind in plans:
        tokens = [sum(s.num_tokens for m in t for s in m) for t in ticks]
        works.append(np.cumsum(tokens))
        padded = [(*t, *((),) * (n - len(t))) for t in (*before, *ticks, *behind)]
        schedule = Schedule(microbatches=tuple(itertools.chain(*padded)), limits=limits)
        run = simulate(schedule, cost, lanes.pipeline, num_lanes=n)
        # A tick is done when the first stage has run its backward pass.
        first = len(before)
        times.append(run.backward_end[0, first : first + len(ticks)])
    common = min(work[-1] for work in works)
    time = [float(np.interp(common, w, t)) for w, t in zip(works, times, strict=True)]
    return sorted(range(len(plans)), key=time.__getitem__)

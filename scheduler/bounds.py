"""How short a run can be at best: lower bounds of the makespan of any schedule."""

import dataclasses
from collections.abc import Iterable

from jaxlora.scheduler.cost import AffineCost, CostModel
from jaxlora.scheduler.simulate import check_stages
from jaxlora.scheduler.types import Limits, Pipeline, Sample, batches_by_job


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """No 1F1B run of a legal schedule of the samples is shorter than either.

    Attributes:
        work: What the busiest stage must do, in as few microbatches as can be, and the
            way of the smallest microbatch to that stage and back.
        chain: The batches of one job, each through the whole pipeline before the next
            may start; the most of all jobs. 0 if batches need not wait for that.
        microbatches: Fewest microbatches and no-ops together.
    """

    work: float
    chain: float
    microbatches: int

    @property
    def makespan(self) -> float:
        return max(self.work, self.chain)

    def gap(self, makespan: float) -> float:
        """By how much `makespan` may be over the shortest possible, relatively."""
        return makespan / self.makespan - 1 if self.makespan else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    tokens: int
    squares: int
    num_samples: int
    longest: int
    fewest: int  # microbatches that it takes


def lower_bound(
    samples: Iterable[Sample], limits: Limits, pipeline: Pipeline, cost: CostModel
) -> Bound:
    """Bounds the makespan and the number of microbatches of every legal schedule."""
    check_stages(cost, pipeline)
    samples = list(samples)
    jobs = [
        [_batch([s.num_tokens for s in batch], limits) for batch in batches]
        for batches in batches_by_job(samples).values()
    ]
    if not jobs:
        return Bound(work=0.0, chain=0.0, microbatches=0)
    padded = sum(limits.padded(b.tokens) for job in jobs for b in job)
    squares = sum(b.squares for job in jobs for b in job)
    # No microbatch has two batches of a job.
    fewest = max(
        -(-padded // limits.capacity), *(sum(b.fewest for b in job) for job in jobs)
    )
    shortest = min(s.num_tokens for s in samples)
    waits = pipeline.distance >= pipeline.num_stages
    return Bound(
        work=_work(padded, squares, fewest, shortest, cost),
        chain=max(sum(_through(b, cost) for b in j) for j in jobs) if waits else 0.0,
        microbatches=max(fewest, *(_slots(job, pipeline) for job in jobs)),
    )


def _batch(lengths: list[int], limits: Limits) -> _Batch:
    return _Batch(
        tokens=sum(lengths),
        squares=sum(n * n for n in lengths),
        num_samples=len(lengths),
        longest=max(lengths),
        fewest=max(1, -(-limits.padded(sum(lengths)) // limits.capacity)),
    )


def _slots(job: list[_Batch], pipeline: Pipeline) -> int:
    """Positions from the first microbatch of a job to its last."""
    apart = (len(job) - 1) * (pipeline.distance - 1)
    return sum(b.fewest for b in job) + apart


def _work(
    padded: int, squares: int, fewest: int, shortest: int, cost: CostModel
) -> float:
    best, way, least = 0.0, 0.0, _least_charge(cost)
    charged = max(padded, fewest * least)
    for stage in cost.stages:
        both = stage.forward + stage.backward
        best = max(best, way + both(charged, squares) + (fewest - 1) * both.base)
        # What comes before a stage's first pass and after its last one.
        way += both(max(shortest, least), shortest**2) + 2 * cost.communication
    return best


def _least_charge(cost: CostModel) -> int:
    """Tokens that every microbatch is charged for at least."""
    return cost.buckets[0] if cost.buckets else 0


def _through(batch: _Batch, cost: CostModel) -> float:
    """Shortest time from a batch's first forward on stage 0 to its last backward there.

    In `num` microbatches, whatever else is in them: over all numbers, as more of them
    overlap better but cost more.
    """
    small = _least_charge(cost)
    whole = sum((s.forward + s.backward for s in cost.stages), start=_NOTHING)
    hops = 2 * (cost.num_stages - 1) * cost.communication
    first = cost.stages[0]
    # Stage 0 still has the forwards before a microbatch and the backwards after it.
    half = _least(first.forward, first.backward)
    shortest = float("inf")
    if batch.fewest == 1:
        shortest = whole(max(batch.tokens, small), batch.squares) + hops
    for num in range(max(2, batch.fewest), batch.num_samples + 1):
        least = max(-(-batch.tokens // num), batch.longest)
        # The way of the largest microbatch, or of that with the longest sample.
        others = (num - 1) * small
        largest = whole(max(least, small), 0) + half(
            max(batch.tokens - least, others), batch.squares
        )
        square = batch.longest**2
        longest = whole(max(batch.longest, small), square) + half(
            max(batch.tokens - batch.longest, others), batch.squares - square
        )
        way = max(largest, longest) + (num - 2) * half.base + hops
        # Or what a stage does, in time to reach it and return.
        busy = max(
            (s.forward + s.backward)(max(batch.tokens, num * small), batch.squares)
            + (num - 1) * (s.forward + s.backward).base
            for s in cost.stages
        )
        shortest = min(shortest, max(way, busy))
    return shortest


_NOTHING = AffineCost(base=0.0, per_token=0.0, per_square=0.0)


def _least(a: AffineCost, b: AffineCost) -> AffineCost:
    return AffineCost(
        base=min(a.base, b.base),
        per_token=min(a.per_token, b.per_token),
        per_square=min(a.per_square, b.per_square),
    )

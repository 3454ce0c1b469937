"""Lower bounds on the makespan of any legal schedule."""

import dataclasses
from collections.abc import Iterable

from jaxlora.scheduler.cost import AffineCost, CostModel
from jaxlora.scheduler.lanes import pooled
from jaxlora.scheduler.simulate import check_stages
from jaxlora.scheduler.types import Limits, Pipeline, Sample, batches_by_job


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Lower bounds for the 1F1B run of any legal schedule of the given samples.

    Attributes:
        work: Bound from the busiest stage: the time of its passes in the fewest
            possible microbatches, plus the time in which the shortest microbatch
            travels to that stage and back.
        chain: Bound from the longest job: each of its batches has to pass through the
            whole pipeline before the next batch may start. It is 0 if the distance of
            the pipeline is too short for that.
        microbatches: Bound on the number of ticks, including no-ops. With one lane, a
            tick is a microbatch.
    """

    work: float
    chain: float
    microbatches: int

    @property
    def makespan(self) -> float:
        return max(self.work, self.chain)

    def gap(self, makespan: float) -> float:
        """Returns by which fraction `makespan` exceeds the lower bound."""
        return makespan / self.makespan - 1 if self.makespan else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    tokens: int
    squares: int
    num_samples: int
    longest: int
    min_microbatches: int


def lower_bound(
    samples: Iterable[Sample],
    limits: Limits,
    pipeline: Pipeline,
    cost: CostModel,
    *,
    num_lanes: int = 1,
) -> Bound:
    """Bounds the makespan and the number of ticks of every legal schedule.

    Args:
        samples: The samples to schedule.
        limits: Capacity and block size.
        pipeline: The pipeline.
        cost: Times of the passes, for the number of stages that `pipeline` has.
        num_lanes: Number of microbatches in a tick.

    Raises:
        ValueError: The cost model and the pipeline differ in the number of stages.
    """
    check_stages(cost, pipeline)
    limits, cost = pooled(limits, cost, num_lanes)
    samples = list(samples)
    jobs = [
        [_make_batch([s.num_tokens for s in batch], limits) for batch in batches]
        for batches in batches_by_job(samples).values()
    ]
    if not jobs:
        return Bound(work=0.0, chain=0.0, microbatches=0)
    padded = sum(limits.padded(b.tokens) for job in jobs for b in job)
    squares = sum(b.squares for job in jobs for b in job)
    # Two batches of the same job never share a microbatch.
    min_microbatches = max(
        -(-padded // limits.capacity),
        *(sum(b.min_microbatches for b in job) for job in jobs),
    )
    shortest = min(s.num_tokens for s in samples)
    chain = 0.0
    if pipeline.distance >= pipeline.num_stages:
        chain = max(sum(_batch_latency(b, cost) for b in job) for job in jobs)
    return Bound(
        work=_work_bound(padded, squares, min_microbatches, shortest, cost),
        chain=chain,
        microbatches=max(min_microbatches, *(_job_slots(j, pipeline) for j in jobs)),
    )


def _make_batch(lengths: list[int], limits: Limits) -> _Batch:
    return _Batch(
        tokens=sum(lengths),
        squares=sum(n * n for n in lengths),
        num_samples=len(lengths),
        longest=max(lengths),
        min_microbatches=max(1, -(-limits.padded(sum(lengths)) // limits.capacity)),
    )


def _job_slots(job: list[_Batch], pipeline: Pipeline) -> int:
    """Minimum number of positions from a job's first microbatch to its last."""
    gaps = (len(job) - 1) * (pipeline.distance - 1)
    return sum(b.min_microbatches for b in job) + gaps


def _work_bound(
    padded: int, squares: int, num_microbatches: int, shortest: int, cost: CostModel
) -> float:
    bound, travel, smallest = 0.0, 0.0, _min_bucket(cost)
    tokens = max(padded, num_microbatches * smallest)
    for stage in cost.stages:
        step = stage.forward + stage.backward
        fixed = (num_microbatches - 1) * step.base
        bound = max(bound, travel + step(tokens, squares) + fixed)
        # The stages before this one delay its first pass and follow its last one.
        travel += step(max(shortest, smallest), shortest**2) + 2 * cost.communication
    return bound


def _min_bucket(cost: CostModel) -> int:
    """Tokens to which every microbatch is padded at least."""
    return cost.buckets[0] if cost.buckets else 0


def _batch_latency(batch: _Batch, cost: CostModel) -> float:
    """Bounds the time from a batch's first forward to its last backward on stage 0.

    It is the minimum over all numbers of microbatches that the batch may be split into.
    More microbatches overlap better, but each of them has a fixed cost. Samples of
    other jobs in the same microbatches only add time, so they are ignored.
    """
    bucket = _min_bucket(cost)
    all_stages = sum((s.forward + s.backward for s in cost.stages), start=_ZERO)
    hops = 2 * (cost.num_stages - 1) * cost.communication
    first = cost.stages[0]
    # While one microbatch travels, stage 0 also runs the forward passes of the earlier
    # ones and the backward passes of the later ones.
    one_pass = _minimum(first.forward, first.backward)
    best = float("inf")
    if batch.min_microbatches == 1:
        best = all_stages(max(batch.tokens, bucket), batch.squares) + hops
    for num in range(max(2, batch.min_microbatches), batch.num_samples + 1):
        tokens = max(-(-batch.tokens // num), batch.longest)
        other_buckets = (num - 1) * bucket
        # One bound follows the microbatch with the most tokens.
        largest = all_stages(max(tokens, bucket), 0) + one_pass(
            max(batch.tokens - tokens, other_buckets), batch.squares
        )
        # Another one follows the microbatch with the longest sample.
        square = batch.longest**2
        longest = all_stages(max(batch.longest, bucket), square) + one_pass(
            max(batch.tokens - batch.longest, other_buckets), batch.squares - square
        )
        travel = max(largest, longest) + (num - 2) * one_pass.base + hops
        # A third one is the work of the busiest stage.
        busiest = max(
            (s.forward + s.backward)(max(batch.tokens, num * bucket), batch.squares)
            + (num - 1) * (s.forward + s.backward).base
            for s in cost.stages
        )
        best = min(best, max(travel, busiest))
    return best


_ZERO = AffineCost(base=0.0, per_token=0.0, per_square=0.0)


def _minimum(a: AffineCost, b: AffineCost) -> AffineCost:
    """Returns a cost that is at most `a` and at most `b` for all arguments."""
    return AffineCost(
        base=min(a.base, b.base),
        per_token=min(a.per_token, b.per_token),
        per_square=min(a.per_square, b.per_square),
    )

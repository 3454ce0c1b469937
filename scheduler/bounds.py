"""Lower bounds on the makespan of any legal schedule."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

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
class _Model:
    """The lanes and stages on which the samples run.

    A tick takes at least as long as each of its samples on one lane, and as long as all
    of them on a lane that is as fast as all lanes together.
    """

    num_lanes: int
    limits: Limits
    cost: CostModel
    all_limits: Limits
    all_cost: CostModel

    @classmethod
    def of(cls, limits: Limits, cost: CostModel, num_lanes: int) -> "_Model":
        return cls(num_lanes, limits, cost, *pooled(limits, cost, num_lanes))

    def padded(self, num_tokens: int) -> int:
        """Pads the tokens of one microbatch to blocks and to the smallest bucket."""
        smallest = self.cost.buckets[0] if self.cost.buckets else 0
        tokens = self.limits.padded(num_tokens)
        return tokens + int(self.cost.padding * max(0, smallest - tokens))


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Samples that run in some number of ticks, perhaps with others.

    Attributes:
        lengths: Lengths of the samples, in ascending order.
        tokens: Fewest tokens of all of them, padded.
        squares: Sum of their squared lengths.
        fewest: Fewest ticks that hold them.
    """

    lengths: np.ndarray
    tokens: int
    squares: int
    fewest: int

    @classmethod
    def of(cls, samples: Sequence[Sample], model: _Model) -> "_Group":
        lengths = np.sort([s.num_tokens for s in samples])
        lanes = _fewest_microbatches(lengths, model.limits.capacity)
        return cls(
            lengths=lengths,
            tokens=model.limits.padded(int(lengths.sum())),
            squares=int((lengths**2).sum()),
            fewest=-(-lanes // model.num_lanes),
        )


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
    samples, model = list(samples), _Model.of(limits, cost, num_lanes)
    if not samples:
        return Bound(work=0.0, chain=0.0, microbatches=0)
    jobs = [
        [_Group.of(batch, model) for batch in batches]
        for batches in batches_by_job(samples).values()
    ]
    together = _Group.of(samples, model)
    # Two batches of the same job never share a tick.
    tokens = sum(batch.tokens for job in jobs for batch in job)
    fewest = max(
        -(-tokens // model.all_limits.capacity),
        together.fewest,
        *(sum(batch.fewest for batch in job) for job in jobs),
    )
    together = dataclasses.replace(together, tokens=tokens, fewest=fewest)
    chain = 0.0
    if pipeline.distance >= pipeline.num_stages:
        chain = max(sum(_latency(batch, model) for batch in job) for job in jobs)
    return Bound(
        work=_latency(together, model),
        chain=chain,
        microbatches=max(fewest, *(_job_slots(job, pipeline) for job in jobs)),
    )


def _fewest_microbatches(lengths: np.ndarray, capacity: int) -> int:
    """Bounds the number of microbatches that hold samples, whose lengths ascend.

    Samples of more than half of the capacity never share one. Other samples, from some
    length on, only fit beside those that leave room for that length.

    References:
        Martello and Toth, Lower bounds and reduction procedures for the bin packing
        problem, 1990, bound L2.
    """
    sums = np.concatenate([[0], lengths.cumsum()])
    half = int(np.searchsorted(lengths, capacity // 2, "right"))
    cuts = np.unique(np.concatenate([[1], lengths[:half]]))
    first = np.searchsorted(lengths, cuts, "left")
    with_room = np.searchsorted(lengths, capacity - cuts, "right")
    room = (with_room - half) * capacity - (sums[with_room] - sums[half])
    more = -(-(sums[half] - sums[first] - room) // capacity)
    return len(lengths) - half + max(0, int(more.max()))


def _job_slots(job: list[_Group], pipeline: Pipeline) -> int:
    """Minimum number of positions from a job's first tick to its last."""
    gaps = (len(job) - 1) * (pipeline.distance - 1)
    return sum(batch.fewest for batch in job) + gaps


def _latency(group: _Group, model: _Model) -> float:
    """Bounds the time from the first forward to the last backward pass of samples.

    It is the minimum over all numbers of ticks that the samples may be split into. More
    ticks overlap better, but each of them has a fixed cost. Other samples in the same
    ticks only add time, so they are ignored.
    """
    best = float("inf")
    if group.fewest == 1:
        best = _one_tick(group, model)
    num = np.arange(max(2, group.fewest), len(group.lengths) + 1)
    if len(num):
        several = np.maximum(_busiest(group, model, num), _paths(group, model, num))
        best = min(best, float(several.min()))
    return best


def _one_tick(group: _Group, model: _Model) -> float:
    longest = int(group.lengths[-1])
    tokens = max(group.tokens, model.num_lanes * model.padded(1))
    out = 2 * (model.cost.num_stages - 1) * model.cost.communication
    for one, every in zip(model.cost.stages, model.all_cost.stages, strict=True):
        step, all_step = one.forward + one.backward, every.forward + every.backward
        out += max(
            step(model.padded(longest), longest**2), all_step(tokens, group.squares)
        )
    return out


def _busiest(group: _Group, model: _Model, num: np.ndarray) -> np.ndarray:
    """Bounds the time by the work of each stage, with `num` ticks.

    The first tick arrives through the stages before it, and the last one, which is
    another one, returns through them.
    """
    shortest, second = (int(n) for n in group.lengths[:2])
    smallest = model.padded(1)
    tokens = np.maximum(group.tokens, num * model.num_lanes * smallest)
    # The first and the last tick hold at least this, as the others may be full.
    ends = group.tokens - (num - 2) * model.all_limits.capacity
    # Two large samples share no microbatch, so a tick has one on each lane at most.
    large = group.lengths[group.lengths > model.limits.capacity // 2][::-1]
    large = large[:: model.num_lanes]
    bound, travel = np.zeros(len(num)), np.zeros(len(num))
    for one, every in zip(model.cost.stages, model.all_cost.stages, strict=True):
        step, all_step = one.forward + one.backward, every.forward + every.backward
        work = all_step(tokens, group.squares) + (num - 1) * all_step.base
        others = (num - len(large)) * step(model.padded(shortest), shortest**2)
        alone = sum(step(model.padded(int(n)), int(n) ** 2) for n in large)
        bound = np.maximum(bound, travel + np.maximum(work, others + alone))
        pair = min(
            one.forward(model.padded(a), a * a) + one.backward(model.padded(b), b * b)
            for a, b in ((shortest, second), (second, shortest))
        )
        per_token = min(every.forward.per_token, every.backward.per_token)
        travel = travel + 2 * model.cost.communication
        travel = travel + np.maximum(pair, step.base + per_token * ends)
    return bound


def _paths(group: _Group, model: _Model, num: np.ndarray) -> np.ndarray:
    """Bounds the time by two paths through the pipeline, with `num` ticks.

    One follows the tick with the most tokens, the other one the longest sample. While
    that tick travels, stage 0 also runs the forward passes of the earlier ticks and the
    backward passes of the later ones.
    """
    lanes, longest = model.num_lanes, int(group.lengths[-1])
    hops = 2 * (model.cost.num_stages - 1) * model.cost.communication
    first = model.all_cost.stages[0]
    one_pass = _minimum(first.forward, first.backward)
    other_buckets = (num - 1) * lanes * model.padded(1)
    most = np.maximum(-(-group.tokens // num), lanes * model.padded(1))
    every = sum((s.forward + s.backward for s in model.all_cost.stages), start=_ZERO)
    with_most = every(most, 0) + one_pass(
        np.maximum(group.tokens - most, other_buckets), group.squares
    )
    held = lanes * model.padded(longest)
    alone = sum((s.forward + s.backward for s in model.cost.stages), start=_ZERO)
    with_longest = alone(model.padded(longest), longest**2) + one_pass(
        np.maximum(group.tokens - held, other_buckets),
        max(0, group.squares - lanes * longest**2),
    )
    return np.maximum(with_most, with_longest) + (num - 2) * one_pass.base + hops


_ZERO = AffineCost(base=0.0, per_token=0.0, per_square=0.0)


def _minimum(a: AffineCost, b: AffineCost) -> AffineCost:
    """Returns a cost that is at most `a` and at most `b` for all arguments."""
    return AffineCost(
        base=min(a.base, b.base),
        per_token=min(a.per_token, b.per_token),
        per_square=min(a.per_square, b.per_square),
    )

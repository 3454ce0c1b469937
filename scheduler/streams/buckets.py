"""Chooses a small set of compiled shapes (buckets) for a run."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxlora.scheduler.algorithms import joint
from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes, Tick, ticks_of
from jaxlora.scheduler.simulate import simulate
from jaxlora.scheduler.streams.ticks import pack_lanes
from jaxlora.scheduler.types import Limits, Sample, Schedule, check_fits, padded_tokens

# Without polishing, whose gains are about the same with any buckets.
_EFFORT = joint.Effort(polish_rounds=0)

Packer = Callable[[Sequence[Sample], Limits, Lanes, CostModel], Schedule]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """The chosen buckets.

    Attributes:
        sizes: Tokens of each bucket, in ascending order; the last is the capacity.
        time: Simulated time of the samples with these buckets.
        fill: Part of the rows of the microbatches that holds real tokens.
        num_ticks: Ticks in which they run.
        single_bucket_time: The time with the capacity as the only bucket.
        single_bucket_fill: The fill then.
    """

    sizes: tuple[int, ...]
    time: float
    fill: float
    num_ticks: int
    single_bucket_time: float
    single_bucket_fill: float


def pack_quickly(
    samples: Sequence[Sample], limits: Limits, lanes: Lanes, cost: CostModel
) -> Schedule:
    """Packs jointly, without polishing."""
    if lanes.num_lanes > 1:
        return pack_lanes(samples, limits, lanes, cost, _EFFORT)
    return joint.pack(samples, limits, lanes.pipeline, cost, _EFFORT)


def rows_of(tick: Tick, limits: Limits, buckets: Sequence[int]) -> int:
    """Returns the rows of each microbatch of a tick, all of which have one bucket."""
    longest = max(padded_tokens(microbatch, limits) for microbatch in tick)
    return next(bucket for bucket in buckets if bucket >= longest)


def choose(
    samples: Sequence[Sample],
    limits: Limits,
    lanes: Lanes,
    cost: CostModel,
    *,
    candidates: Sequence[int],
    max_buckets: int = 3,
    min_gain: float = 0.01,
    packer: Packer = pack_quickly,
) -> Buckets:
    """Chooses buckets greedily: it keeps adding the one that saves the most time.

    The capacity is always a bucket. The samples are packed again for every set of
    buckets that is tried, because packers fill microbatches up to the bucket sizes. All
    lanes of a tick run in the bucket of the longest one.

    Args:
        samples: The samples to run, or a representative part of them.
        limits: Capacity and block size.
        lanes: The lanes.
        cost: Costs of microbatches. Its own buckets are ignored.
        candidates: Bucket sizes to choose from, in tokens. Sizes above the capacity are
            ignored.
        max_buckets: Maximum number of buckets. Each one has to be compiled.
        min_gain: Minimum fraction of the time that another bucket must save.
        packer: Makes the schedules.

    Raises:
        ValueError: `max_buckets` is not positive, a candidate is not a multiple of the
            block size, or a sample is longer than the capacity.
    """
    invalid = [c for c in candidates if c < 1 or c % limits.block_tokens]
    if max_buckets < 1 or invalid:
        raise ValueError(
            f"max_buckets={max_buckets} must be positive, and the candidates "
            f"{invalid or list(candidates)} must be multiples of "
            f"{limits.block_tokens} tokens."
        )
    check_fits(samples, limits)
    n = lanes.num_lanes

    def packed_with(sizes: tuple[int, ...]) -> tuple[float, float, int]:
        """Returns the time, the fill and the number of ticks."""
        bucketed = dataclasses.replace(cost, buckets=sizes)
        schedule = packer(samples, limits, lanes, bucketed)
        time = simulate(schedule, bucketed, lanes.pipeline, num_lanes=n).makespan
        ticks = [t for t in ticks_of(schedule.microbatches, n) if any(t)]
        rows = n * sum(rows_of(tick, limits, sizes) for tick in ticks)
        return time, sum(s.num_tokens for s in samples) / max(1, rows), len(ticks)

    sizes = (limits.capacity,)
    time, fill, num_ticks = single_time, single_fill, _ = packed_with(sizes)
    remaining = sorted({c for c in candidates if c < limits.capacity})
    while remaining and len(sizes) < max_buckets:
        found = {c: packed_with(tuple(sorted((*sizes, c)))) for c in remaining}
        best = min(remaining, key=lambda c: (found[c][0], c))
        if found[best][0] > (1 - min_gain) * time:
            break
        sizes, (time, fill, num_ticks) = tuple(sorted((*sizes, best))), found[best]
        remaining.remove(best)
    return Buckets(
        sizes=sizes,
        time=time,
        fill=fill,
        num_ticks=num_ticks,
        single_bucket_time=single_time,
        single_bucket_fill=single_fill,
    )

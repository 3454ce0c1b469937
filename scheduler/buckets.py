"""Chooses a small set of compiled shapes (buckets) for a run."""

import dataclasses
from collections.abc import Sequence

from jaxlora.scheduler import joint
from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.plan import Packer
from jaxlora.scheduler.simulate import window_sum
from jaxlora.scheduler.types import Limits, Pipeline, Sample, check_fits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """The chosen buckets.

    Attributes:
        sizes: Tokens of each bucket, in ascending order; the last is the capacity.
        time: Estimated time of the samples with these buckets (`simulate.window_sum`).
        single_bucket_time: Estimated time with the capacity as the only bucket.
    """

    sizes: tuple[int, ...]
    time: float
    single_bucket_time: float


def choose(
    samples: Sequence[Sample],
    limits: Limits,
    pipeline: Pipeline,
    cost: CostModel,
    *,
    candidates: Sequence[int],
    max_buckets: int = 3,
    min_gain: float = 0.01,
    packer: Packer = joint.pack,
) -> Buckets:
    """Chooses buckets greedily: it keeps adding the one that saves the most time.

    The capacity is always a bucket. The samples are packed again for every set of
    buckets that is tried, because packers fill microbatches up to the bucket sizes.

    Args:
        samples: The samples to run, or a representative part of them.
        limits: Capacity and block size.
        pipeline: The pipeline.
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

    def time_with(sizes: tuple[int, ...]) -> float:
        bucketed = dataclasses.replace(cost, buckets=sizes)
        return window_sum(packer(samples, limits, pipeline, bucketed), bucketed)

    sizes = (limits.capacity,)
    time = single_bucket_time = time_with(sizes)
    remaining = sorted({c for c in candidates if c < limits.capacity})
    while remaining and len(sizes) < max_buckets:
        times = {c: time_with(tuple(sorted((*sizes, c)))) for c in remaining}
        best = min(remaining, key=lambda c: (times[c], c))
        if times[best] > (1 - min_gain) * time:
            break
        sizes, time = tuple(sorted((*sizes, best))), times[best]
        remaining.remove(best)
    return Buckets(sizes=sizes, time=time, single_bucket_time=single_bucket_time)

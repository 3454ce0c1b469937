"""Chooses the compiled shapes of a run: few, and what they cost in padding is small."""

import dataclasses
from collections.abc import Sequence

from jaxlora.scheduler import joint
from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.plan import Packer
from jaxlora.scheduler.simulate import window_sum
from jaxlora.scheduler.types import Limits, Pipeline, Sample, check_fits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """A choice of compiled shapes.

    Attributes:
        sizes: Tokens of each, ascending; the last is the capacity.
        time: Simulated time of the samples in them, by the cost's window sum.
        time_of_one: The same with the capacity as the only shape.
    """

    sizes: tuple[int, ...]
    time: float
    time_of_one: float


def choose(
    samples: Sequence[Sample],
    limits: Limits,
    pipeline: Pipeline,
    cost: CostModel,
    *,
    candidates: Sequence[int],
    most: int = 3,
    least_gain: float = 0.01,
    packer: Packer = joint.pack,
) -> Buckets:
    """Adds the shape that saves most time, again and again, to that of the capacity.

    Every set of shapes is packed anew, as a packer fills the shapes that there are.

    Args:
        samples: What is to run, or a part of it that stands for the rest.
        limits: Capacity and block size.
        pipeline: The executor.
        cost: What a pass over so many tokens costs; its own buckets do not matter.
        candidates: Shapes to choose from, in tokens; those over the capacity are not.
        most: How many shapes there may be: each takes its time to compile.
        least_gain: Share of the time that a further shape must save.
        packer: Makes the schedules.

    Raises:
        ValueError: `most` is not positive, a candidate is not a multiple of the block
            size, or a sample is over the capacity.
    """
    wrong = [c for c in candidates if c < 1 or c % limits.block_tokens]
    if most < 1 or wrong:
        raise ValueError(
            f"most must be positive and candidates multiples of {limits.block_tokens} "
            f"tokens, got {most} and {wrong or list(candidates)}."
        )
    check_fits(samples, limits)

    def time_in(sizes: tuple[int, ...]) -> float:
        in_shapes = dataclasses.replace(cost, buckets=sizes)
        return window_sum(packer(samples, limits, pipeline, in_shapes), in_shapes)

    sizes = (limits.capacity,)
    time = of_one = time_in(sizes)
    left = sorted({c for c in candidates if c < limits.capacity})
    while left and len(sizes) < most:
        tried = {c: time_in(tuple(sorted((*sizes, c)))) for c in left}
        best = min(left, key=lambda c: (tried[c], c))
        if tried[best] > (1 - least_gain) * time:
            break
        sizes, time = tuple(sorted((*sizes, best))), tried[best]
        left.remove(best)
    return Buckets(sizes=sizes, time=time, time_of_one=of_one)

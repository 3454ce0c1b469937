"""The last step: no-ops where batches are too close, and a check of every rule."""

from collections.abc import Iterable, Sequence

from jaxlora.scheduler.check import require_legal
from jaxlora.scheduler.spacing import with_no_ops
from jaxlora.scheduler.types import Limits, Microbatch, Pipeline, Sample, Schedule


def verify_and_fix(
    microbatches: Iterable[Microbatch],
    samples: Sequence[Sample],
    limits: Limits,
    pipeline: Pipeline,
) -> Schedule:
    """Algorithm 1 of LoRAFusion, line 15.

    Adds the fewest no-ops that this order of microbatches can do with, each right
    before the microbatch that is too early.

    Raises:
        RuntimeError: The schedule breaks a rule all the same.
    """
    schedule = Schedule(
        microbatches=tuple(with_no_ops(microbatches, pipeline.distance)), limits=limits
    )
    require_legal(schedule, samples, distance=pipeline.distance)
    return schedule

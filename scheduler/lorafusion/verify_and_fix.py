"""Adds no-ops where batches are too close, and checks every rule."""

from collections.abc import Iterable, Sequence

from jaxlora.scheduler.check import require_legal
from jaxlora.scheduler.lanes import Lanes
from jaxlora.scheduler.spacing import with_no_ops
from jaxlora.scheduler.types import Limits, Microbatch, Pipeline, Sample, Schedule


def verify_and_fix(
    microbatches: Iterable[Microbatch],
    samples: Sequence[Sample],
    limits: Limits,
    pipeline: Pipeline,
) -> Schedule:
    """Completes a schedule by Algorithm 1 of LoRAFusion, line 15.

    It adds the fewest no-ops that this order of microbatches allows, each right before
    the microbatch that would be too early.

    Raises:
        RuntimeError: The schedule still violates a rule.
    """
    schedule = Schedule(
        microbatches=tuple(with_no_ops(microbatches, pipeline.distance)), limits=limits
    )
    require_legal(schedule, samples, Lanes(pipeline=pipeline))
    return schedule

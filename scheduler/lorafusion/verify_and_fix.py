"""The last step: no-ops where batches are too close, and a check of every rule."""

from collections.abc import Iterable, Sequence

from scheduler.check import violations
from scheduler.lorafusion.spacing import Spacing
from scheduler.types import Limits, Microbatch, Pipeline, Sample, Schedule


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
    wrong = violations(schedule, samples, distance=pipeline.distance)
    if wrong:
        raise RuntimeError(
            f"the schedule breaks {len(wrong)} rules; the first: {wrong[0]} This is a "
            "mistake of the packer, not of its input."
        )
    return schedule


def with_no_ops(microbatches: Iterable[Microbatch], distance: int):
    """The microbatches, and an empty one wherever one must wait."""
    spacing = Spacing(distance)
    for microbatch in microbatches:
        for _ in range(spacing.place(microbatch)):
            yield ()
        yield microbatch

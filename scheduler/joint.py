"""The default packer: all jobs and several global batches at once, by cost."""

from collections.abc import Iterator, Sequence

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.planner import DEFAULT, FEWEST, Effort, JobBatches, Planner
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pipeline,
    Sample,
    Schedule,
    batches_by_job,
    check_fits,
)

__all__ = [
    "DEFAULT",
    "FEWEST",
    "Effort",
    "JobBatches",
    "Planner",
    "job_batches",
    "pack",
    "stream",
]


def pack(
    samples: Sequence[Sample],
    limits: Limits,
    pipeline: Pipeline,
    cost: CostModel,
    effort: Effort = DEFAULT,
) -> Schedule:
    """Packs any number of global batches of any number of jobs.

    Args:
        samples: In any order; batches of a job may differ in size, and jobs in their
            number of batches.
        limits: Capacity and block size.
        pipeline: Says how far apart batches of a job must be.
        cost: What is to be made small.
        effort: How hard to try.

    Raises:
        ValueError: A sample is longer than the capacity.
    """
    check_fits(samples, limits)
    windows = stream(job_batches(samples), limits, pipeline, cost, effort)
    microbatches = tuple(m for window in windows for m in window)
    return Schedule(microbatches=microbatches, limits=limits)


def job_batches(samples: Sequence[Sample]) -> list[JobBatches]:
    """What `stream` takes, of samples that are all here; by ascending job."""
    return [
        JobBatches(
            batches=batches,
            num_batches=len(batches),
            batch_tokens=sum(s.num_tokens for b in batches for s in b) / len(batches),
        )
        for _, batches in sorted(batches_by_job(samples).items())
    ]


def stream(
    jobs: Sequence[JobBatches],
    limits: Limits,
    pipeline: Pipeline,
    cost: CostModel,
    effort: Effort = DEFAULT,
) -> Iterator[list[Microbatch]]:
    """The microbatches of `pack`, window by window, reading batches as it goes.

    Args:
        jobs: What to run; those that need it most come first, then in this order.
        limits: As for `pack`, like the rest.
        pipeline: The executor.
        cost: What is to be made small.
        effort: How hard to try.

    Raises:
        ValueError: A batch that was read is empty, or has a sample over the
            capacity.
    """
    planner = Planner(limits, pipeline, cost, effort)
    for job in jobs:
        planner.add(job)
    while window := planner.next_window():
        yield window

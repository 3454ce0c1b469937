"""The default packer, which plans all jobs and several global batches together."""

from collections.abc import Iterator, Sequence

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.planner import DEFAULT_EFFORT, Effort, JobBatches, Planner
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
    "DEFAULT_EFFORT",
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
    effort: Effort = DEFAULT_EFFORT,
) -> Schedule:
    """Packs any number of global batches of any number of jobs.

    Args:
        samples: The samples, in any order. The batches of a job may differ in size, and
            jobs may differ in their number of batches.
        limits: Capacity and block size.
        pipeline: Provides the distance between the batches of a job.
        cost: Costs of microbatches, which the packer minimizes.
        effort: How hard to plan.

    Raises:
        ValueError: A sample is longer than the capacity, or the cost model and the
            pipeline differ in the number of stages.
    """
    check_fits(samples, limits)
    windows = stream(job_batches(samples), limits, pipeline, cost, effort)
    microbatches = tuple(m for window in windows for m in window)
    return Schedule(microbatches=microbatches, limits=limits)


def job_batches(samples: Sequence[Sample]) -> list[JobBatches]:
    """Converts samples to the input of `stream`, in ascending order of jobs."""
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
    effort: Effort = DEFAULT_EFFORT,
) -> Iterator[list[Microbatch]]:
    """Yields the microbatches of `pack` window by window, and reads batches as needed.

    Args:
        jobs: The batches of each job.
        limits: Capacity and block size.
        pipeline: Provides the distance between the batches of a job.
        cost: Costs of microbatches, which the packer minimizes.
        effort: How hard to plan.

    Raises:
        ValueError: A batch that was read is invalid, for example because a sample is
            longer than the capacity.
    """
    planner = Planner(limits, pipeline, cost, effort)
    for job in jobs:
        planner.add(job)
    while window := planner.next_window():
        yield window

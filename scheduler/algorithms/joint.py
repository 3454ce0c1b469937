"""The default packer, which plans all jobs and several global batches together."""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.simulate import simulate
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pipeline,
    Sample,
    Schedule,
    batches_by_job,
    check_fits,
)
from jaxlora.scheduler.windows.planner import (
    DEFAULT_EFFORT,
    Effort,
    JobBatches,
    Planner,
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

# Samples of a plan that is compared with one without polishing.
_MAX_COMPARED = 8192


def pack(
    samples: Sequence[Sample],
    limits: Limits,
    pipeline: Pipeline,
    cost: CostModel,
    effort: Effort = DEFAULT_EFFORT,
) -> Schedule:
    """Packs any number of global batches of any number of jobs.

    Polishing sees a window and its neighbors, so it may prolong the rest of a plan. If
    there are not too many samples, a plan without polishing is made as well, and the
    shorter one is returned.

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
    jobs, efforts = job_batches(samples), [effort]
    if effort.polish_rounds and len(samples) <= _MAX_COMPARED:
        efforts.append(dataclasses.replace(effort, polish_rounds=0))
    schedules = []
    for tried in efforts:
        windows = stream(jobs, limits, pipeline, cost, tried)
        microbatches = tuple(m for window in windows for m in window)
        schedules.append(Schedule(microbatches=microbatches, limits=limits))
    if len(schedules) == 1 or schedules[0] == schedules[1]:
        return schedules[0]
    return min(schedules, key=lambda s: simulate(s, cost, pipeline).makespan)


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
    """Yields microbatches window by window, and reads batches as needed.

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

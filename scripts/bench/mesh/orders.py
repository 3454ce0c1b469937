"""The orders in which the same samples run: ours, and those of others."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jaxlora.scheduler import Lanes, Limits, Sample, Schedule
from jaxlora.scheduler.algorithms import mlora
from jaxlora.train.job_state import JobState
from jaxlora.train.plan.job_slots import pack_whole

Order = Literal["together", "one by one", "round robin"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Microbatches of some jobs, after which the devices have nothing to do.

    Attributes:
        jobs: The jobs, by slot.
        schedule: All samples of the jobs.
    """

    jobs: Mapping[int, JobState]
    schedule: Schedule


def windows(
    order: Order,
    jobs: Mapping[int, JobState],
    limits: Limits,
    lanes: Lanes,
    round_robin_samples: int = 0,
) -> list[Window]:
    """Schedules all samples of some jobs.

    - `together`: the planner packs the samples of all jobs.
    - `one by one`: a window for each job, as if it ran alone. Its next global batch
      enters a pipeline when the one before has drained, as in Megatron-LM. The samples
      of a batch are packed to the capacity of microbatches.
    - `round robin`: the jobs take turns, each with a global batch, and no microbatch
      has samples of two jobs. This is mLoRA's order, for a pipeline.

    Args:
        order: The order.
        jobs: The jobs, by slot.
        limits: Limits of a microbatch.
        lanes: The lanes of the mesh.
        round_robin_samples: Most samples in a microbatch of `round robin`; 0: as many
            as fit on average.

    Returns:
        Windows that run one after the other.
    """
    if order == "one by one":
        return [
            Window(
                jobs={slot: job},
                schedule=pack_whole(samples_of({slot: job}), limits, "greedy", lanes),
            )
            for slot, job in jobs.items()
        ]
    samples = samples_of(jobs)
    if order == "together":
        schedule = pack_whole(samples, limits, "joint", lanes)
    else:
        assert lanes.num_lanes == 1
        mean = sum(s.num_tokens for s in samples) / len(samples)
        most = round_robin_samples or max(1, round(limits.capacity / mean))
        schedule = mlora.pack(
            samples, limits, lanes.pipeline, samples_per_microbatch=most
        )
    return [Window(jobs=jobs, schedule=schedule)]


def samples_of(jobs: Mapping[int, JobState]) -> list[Sample]:
    """Returns all samples of some jobs, which they name by slot."""
    return [
        Sample(owner=slot, batch=step, index=i, num_tokens=int(num_tokens))
        for slot, job in jobs.items()
        for step in range(job.num_steps)
        for i, num_tokens in enumerate(job.prepared.lengths(step))
    ]

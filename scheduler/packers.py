"""Packers by name, all called alike: samples, limits, pipeline and cost."""

from collections.abc import Sequence
from typing import Literal

from jaxlora.scheduler import greedy, joint, lorafusion
from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.plan import Packer
from jaxlora.scheduler.simulate import window_sum
from jaxlora.scheduler.spacing import with_no_ops
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pipeline,
    Sample,
    Schedule,
    batches_by_job,
)

PackerName = Literal["joint", "greedy", "lorafusion"]


def get_packer(name: PackerName) -> Packer:
    """The packer of a name.

    Raises:
        ValueError: There is none.
    """
    if name not in _PACKERS:
        raise ValueError(f"there is no packer {name!r}; there are {sorted(_PACKERS)}.")
    return _PACKERS[name]


def by_rounds(
    samples: Sequence[Sample], limits: Limits, pipeline: Pipeline, cost: CostModel
) -> Schedule:
    """First-fit decreasing, a round at a time: the next global batch of every job.

    No microbatch has samples of two rounds. No-ops keep the distance.
    """
    jobs = batches_by_job(samples).values()
    microbatches: list[Microbatch] = []
    for k in range(max(map(len, jobs), default=0)):
        together = [s for batches in jobs if k < len(batches) for s in batches[k]]
        microbatches += greedy.pack(together, limits).microbatches
    spaced = tuple(with_no_ops(microbatches, pipeline.distance))
    return Schedule(microbatches=spaced, limits=limits)


def _joint(
    samples: Sequence[Sample], limits: Limits, pipeline: Pipeline, cost: CostModel
) -> Schedule:
    """Joint packing; or by rounds, which now and then wins where jobs are few."""
    candidates = (
        joint.pack(samples, limits, pipeline, cost),
        by_rounds(samples, limits, pipeline, cost),
    )
    return min(candidates, key=lambda schedule: window_sum(schedule, cost))


def _lorafusion(
    samples: Sequence[Sample], limits: Limits, pipeline: Pipeline, cost: CostModel
) -> Schedule:
    return lorafusion.pack(samples, limits, pipeline)


_PACKERS: dict[str, Packer] = {
    "joint": _joint,
    "greedy": by_rounds,
    "lorafusion": _lorafusion,
}

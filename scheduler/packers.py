"""The registry of packers, which all have the same signature."""

from collections.abc import Sequence
from typing import Literal

from jaxlora.scheduler.algorithms import (
    bridges,
    greedy,
    joint,
    lorafusion,
    mlora,
    rounds,
)
from jaxlora.scheduler.algorithms.spacing import with_no_ops
from jaxlora.scheduler.bounds import lower_bound
from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes
from jaxlora.scheduler.plan import Packer
from jaxlora.scheduler.simulate import simulate
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pipeline,
    Sample,
    Schedule,
    batches_by_job,
)
from jaxlora.scheduler.windows.polish import polished
from jaxlora.scheduler.windows.window import drains

PackerName = Literal["joint", "greedy", "lorafusion"]

# Other orders are only tried if joint packing exceeds the bound by more than this, and
# only among few jobs.
_SMALL_GAP = 0.01
_FEW_JOBS = 64
# Samples of a schedule that is polished as a whole.
_FEW_SAMPLES = 1024


def get_packer(name: PackerName) -> Packer:
    """Returns the packer with the given name.

    Raises:
        ValueError: There is no packer with this name.
    """
    if name not in _PACKERS:
        raise ValueError(f"unknown packer {name!r}. Choose one of {sorted(_PACKERS)}.")
    return _PACKERS[name]


def by_rounds(
    samples: Sequence[Sample], limits: Limits, pipeline: Pipeline, cost: CostModel
) -> Schedule:
    """Packs one round at a time by first-fit decreasing.

    A round is the next global batch of every job. A microbatch never holds samples of
    two rounds. No-ops keep the batches of a job apart.
    """
    jobs = batches_by_job(samples).values()
    microbatches: list[Microbatch] = []
    for k in range(max(map(len, jobs), default=0)):
        batch = [s for batches in jobs if k < len(batches) for s in batches[k]]
        microbatches += greedy.pack(batch, limits).microbatches
    spaced = tuple(with_no_ops(microbatches, pipeline.distance))
    return Schedule(microbatches=spaced, limits=limits)


def _joint(
    samples: Sequence[Sample], limits: Limits, pipeline: Pipeline, cost: CostModel
) -> Schedule:
    """Packs jointly, and in other orders if the bound leaves room and jobs are few.

    Packing by rounds, and mLoRA's order if batches are tiny, are sometimes better, as
    are bridges if one job has most of the work. The best order of few samples is
    polished as a whole.
    """
    schedule = joint.pack(samples, limits, pipeline, cost)
    if len({s.owner for s in samples}) > _FEW_JOBS:
        return schedule
    time = lambda s: simulate(s, cost, pipeline).makespan
    if lower_bound(samples, limits, pipeline, cost).gap(time(schedule)) <= _SMALL_GAP:
        return schedule
    candidates = [
        schedule,
        by_rounds(samples, limits, pipeline, cost),
        mlora.pack(samples, limits, pipeline),
    ]
    candidates = [one for one in candidates if one.keeps_max_samples]
    best = min(candidates, key=time)
    if not drains(pipeline, cost) or len(samples) > _FEW_SAMPLES:
        return best
    as_schedule = lambda m: Schedule(microbatches=tuple(m), limits=limits)
    # Most of the best order is polished already, and bridges are not.
    bridged = bridges.pack(samples, limits, pipeline, cost)
    raw = [as_schedule(bridged) if bridged else best]
    if ticks := rounds.pack(samples, limits, Lanes(pipeline=pipeline), cost):
        raw.append(as_schedule(tick[0] if tick else () for tick in ticks))
    max_rounds = joint.DEFAULT_EFFORT.polish_rounds
    polish = lambda one: polished(one, cost, pipeline, max_rounds=max_rounds)
    return min([best, *raw, *map(polish, raw)], key=time)


def _lorafusion(
    samples: Sequence[Sample], limits: Limits, pipeline: Pipeline, cost: CostModel
) -> Schedule:
    return lorafusion.pack(samples, limits, pipeline)


_PACKERS: dict[str, Packer] = {
    "joint": _joint,
    "greedy": by_rounds,
    "lorafusion": _lorafusion,
}

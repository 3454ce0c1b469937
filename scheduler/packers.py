"""The registry of packers, and plans: schedules that are checked and simulated."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

from jaxlora.scheduler.bounds import Bound, lower_bound
from jaxlora.scheduler.check import require_legal
from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes
from jaxlora.scheduler.pack import whole
from jaxlora.scheduler.pack.fill import balanced
from jaxlora.scheduler.papers import greedy, lorafusion
from jaxlora.scheduler.simulate import Simulation, simulate
from jaxlora.scheduler.types import Limits, Pipeline, Sample, Schedule, check_fits

Packer = Callable[[Sequence[Sample], Limits, Pipeline, CostModel], Schedule]
PackerName = Literal["joint", "greedy", "lorafusion"]

_PACKERS: dict[str, Packer] = {
    "joint": whole.pack,
    "greedy": lambda samples, limits, pipeline, _: greedy.by_rounds(
        samples, limits, pipeline
    ),
    "lorafusion": lambda samples, limits, pipeline, _: lorafusion.pack(
        samples, limits, pipeline
    ),
}


def get_packer(name: PackerName) -> Packer:
    """Returns the packer with the given name.

    Raises:
        ValueError: There is no packer with this name.
    """
    if name not in _PACKERS:
        raise ValueError(f"unknown packer {name!r}. Choose one of {sorted(_PACKERS)}.")
    return _PACKERS[name]


def pack_ticks(
    samples: Sequence[Sample],
    limits: Limits,
    packer: PackerName,
    lanes: Lanes,
    cost: CostModel,
) -> Schedule:
    """Packs samples into ticks: one microbatch for each lane, run at the same time.

    With one lane, this is the packer's own schedule. With more lanes, the microbatches
    of packers other than `joint` are arranged in ticks.

    Two batches of a job never share a tick, as the second one needs the weights after
    the first. So a tick can only be full if its jobs have enough samples in one batch
    each.

    Args:
        samples: The samples.
        limits: Limits of a microbatch.
        packer: Name of the packer.
        lanes: The lanes.
        cost: Times of a microbatch on one lane.

    Returns:
        A schedule whose number of microbatches is a multiple of the number of lanes.

    Raises:
        ValueError: A sample is longer than the capacity, or the cost model and the
            pipeline differ in the number of stages.
    """
    n, pipeline = lanes.num_lanes, lanes.pipeline
    if packer == "joint":
        return whole.pack(samples, limits, pipeline, cost, num_lanes=n)
    pack = get_packer(packer)
    if n == 1:
        return pack(samples, limits, pipeline, cost)
    check_fits(samples, limits)
    packed = pack(samples, limits, whole.far_apart(pipeline, n), cost)
    ticks = whole.arrange(packed.microbatches, n, pipeline.distance)
    microbatches = itertools.chain.from_iterable(balanced(ticks, n))
    return Schedule(microbatches=tuple(microbatches), limits=limits)


# ---- plans ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A legal schedule, its simulation, and a lower bound for its samples."""

    schedule: Schedule
    simulation: Simulation
    bound: Bound

    @property
    def gap(self) -> float:
        """Fraction by which the simulated makespan exceeds the lower bound."""
        return self.bound.gap(self.simulation.makespan)


def plan(
    samples: Sequence[Sample],
    limits: Limits,
    pipeline: Pipeline,
    cost: CostModel,
    *,
    packer: Packer = whole.pack,
) -> Plan:
    """Packs samples and reports how good the schedule is.

    Args:
        samples: Any number of global batches of any number of jobs.
        limits: Capacity and block size.
        pipeline: The pipeline.
        cost: Times of the passes, for the number of stages that `pipeline` has.
        packer: Makes the schedule.

    Raises:
        ValueError: A sample is longer than the capacity, or the cost model and the
            pipeline differ in the number of stages.
        RuntimeError: The packer's schedule violates a rule.
    """
    schedule = packer(samples, limits, pipeline, cost)
    return evaluate(schedule, samples, Lanes(pipeline=pipeline), cost)


def evaluate(
    schedule: Schedule, samples: Sequence[Sample], lanes: Lanes, cost: CostModel
) -> Plan:
    """Checks and simulates a schedule.

    Raises:
        ValueError: The cost model and the pipeline differ in the number of stages.
        RuntimeError: The schedule violates a rule.
    """
    require_legal(schedule, samples, lanes)
    pipeline, n = lanes.pipeline, lanes.num_lanes
    return Plan(
        schedule=schedule,
        simulation=simulate(schedule, cost, pipeline, num_lanes=n),
        bound=lower_bound(samples, schedule.limits, pipeline, cost, num_lanes=n),
    )

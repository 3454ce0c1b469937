"""Makes, checks, simulates and bounds a schedule."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxlora.scheduler.bounds import Bound, lower_bound
from jaxlora.scheduler.check import require_legal
from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes
from jaxlora.scheduler.pack import whole
from jaxlora.scheduler.simulate import Simulation, simulate
from jaxlora.scheduler.types import Limits, Pipeline, Sample, Schedule

Packer = Callable[[Sequence[Sample], Limits, Pipeline, CostModel], Schedule]


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

    Args:
        schedule: The schedule.
        samples: The samples that it holds.
        lanes: The lanes that it is for.
        cost: Times of the passes of a microbatch on one lane of each stage.

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

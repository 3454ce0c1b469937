"""A schedule with everything that is known of it before it runs."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxlora.scheduler import joint
from jaxlora.scheduler.bounds import Bound, lower_bound
from jaxlora.scheduler.check import require_legal
from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.simulate import Simulation, simulate
from jaxlora.scheduler.types import Limits, Pipeline, Sample, Schedule

Packer = Callable[[Sequence[Sample], Limits, Pipeline, CostModel], Schedule]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A checked schedule, its simulated run, and how good a run could be at best."""

    schedule: Schedule
    simulation: Simulation
    bound: Bound

    @property
    def gap(self) -> float:
        """The simulated run is at most so much, relatively, over the shortest one."""
        return self.bound.gap(self.simulation.makespan)


def plan(
    samples: Sequence[Sample],
    limits: Limits,
    pipeline: Pipeline,
    cost: CostModel,
    *,
    packer: Packer = joint.pack,
) -> Plan:
    """Packs, checks, simulates and bounds.

    Raises:
        ValueError: A sample is longer than the capacity, or costs and pipeline differ.
        RuntimeError: The packer broke a rule.
    """
    schedule = packer(samples, limits, pipeline, cost)
    require_legal(schedule, samples, distance=pipeline.distance)
    return Plan(
        schedule=schedule,
        simulation=simulate(schedule, cost, pipeline),
        bound=lower_bound(samples, limits, pipeline, cost),
    )

"""Predicts what a planned run needs: memory, and time alone and together."""

import dataclasses

from jaxlora.memory.mesh import estimated_footprint
from jaxlora.memory.need import MemoryNeed
from jaxlora.memory.refusal import refusal
from jaxlora.train.plan.auto_mesh.machine import this_machine
from jaxlora.train.plan.run_plan import RunPlan


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTime:
    """Predicted time of training, without start-up, evaluations and checkpoints.

    Attributes:
        together: Seconds of the run.
        apart: Seconds of its jobs one after the other, each alone on the same mesh.
    """

    together: float
    apart: float

    @property
    def hours(self) -> float:
        """Hours of the run."""
        return self.together / 3600


def memory_need(plan: RunPlan) -> MemoryNeed:
    """Estimates the memory of a run."""
    tokens = plan.config.limits.capacity
    found = estimated_footprint(plan.stages, plan.config.block_tokens, tokens)
    available = this_machine().memory_of(plan.stages.sizes.num_devices)
    return MemoryNeed.of(plan.stages, found, tokens, available)


def check_fits(plan: RunPlan) -> None:
    """Refuses a run that is estimated not to fit.

    Raises:
        DoesNotFitError: It does not.
    """
    need = memory_need(plan)
    if need.fits:
        return
    assert need.available is not None
    found = estimated_footprint(plan.stages, plan.config.block_tokens, need.tokens)
    raise refusal(plan.config, plan.stages, plan.bounds, found, need.available)

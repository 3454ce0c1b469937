"""Whether to deploy other replicas after jobs have joined or left."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from jaxlora.scheduler.replicas.deploy import (
    PlannedDeployment,
    plan_deployment,
    try_steps,
)
from jaxlora.scheduler.replicas.problem import Deployment, ReplicaKind, check_fit
from jaxlora.scheduler.replicas.steps import Steps


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Replan:
    """A decision between the deployment that runs and another one.

    Attributes:
        current: The deployment that runs; None: it cannot hold the longest sample.
        planned: The best one that was found.
        num_steps: Steps that are left.
        moving_seconds: Time in which the replicas change.
    """

    current: PlannedDeployment | None
    planned: PlannedDeployment
    num_steps: int
    moving_seconds: float

    @property
    def gain_seconds(self) -> float:
        """Seconds that the other deployment saves until the end, beyond the move."""
        if self.current is None:
            return float("inf")
        each = self.current.seconds - self.planned.seconds
        return self.num_steps * each - self.moving_seconds

    @property
    def moves(self) -> bool:
        """Whether to move."""
        return self.gain_seconds > 0

    @property
    def deployment(self) -> Deployment:
        """The deployment for the steps that are left."""
        if self.moves or self.current is None:
            return self.planned.deployment
        return self.current.deployment


def replan(
    current: Deployment,
    kinds: Sequence[ReplicaKind],
    num_gpus: int,
    batches: Sequence[np.ndarray],
    *,
    longest: int = 0,
    num_steps: int,
    moving_seconds: Callable[[Deployment, Deployment], float],
) -> Replan:
    """Decides whether to change replicas for the jobs that now run.

    Args:
        current: The replicas that run.
        kinds: Kinds of replicas to choose from.
        num_gpus: Number of GPUs.
        batches: Lengths of the samples of some steps of the jobs that now run.
        longest: The longest length of other steps of these jobs.
        num_steps: Steps for which these jobs will run.
        moving_seconds: Time in which one deployment takes the place of another one:
            jobs are parked, replicas load the base, jobs are restored.

    Raises:
        ValueError: There are no samples, or the longest fits into no replica.

    References:
        LobRA, https://doi.org/10.14778/3742728.3742752, section 5.1, which always
        takes the new plan.
    """
    planned = plan_deployment(kinds, num_gpus, batches, longest)
    batches = [np.asarray(batch) for batch in batches if len(batch)]
    same: PlannedDeployment | None = None
    if check_fit(kinds, batches, longest) <= current.longest:
        bounds = Steps(current.kinds, batches).bounds(current.counts)
        mean = float(bounds.mean())
        same = try_steps(current, batches, mean, min(mean, planned.bound))
    same_kinds = changed_replicas(current, planned.deployment) == 0
    moving = moving_seconds(current, planned.deployment)
    return Replan(
        current=same,
        planned=planned,
        num_steps=num_steps,
        moving_seconds=0.0 if same_kinds else moving,
    )


def changed_replicas(current: Deployment, planned: Deployment) -> int:
    """Returns how many replicas of a plan are not there yet, by their degrees."""
    degrees = lambda one: Counter((kind.tensor, kind.stage) for kind in one.replicas)
    return (degrees(planned) - degrees(current)).total()

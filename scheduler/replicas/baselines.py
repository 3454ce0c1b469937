"""Deployments to compare with: replicas of one kind, and one job after the other."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxlora.scheduler.replicas.deploy import PlannedDeployment, try_steps
from jaxlora.scheduler.replicas.problem import Deployment, ReplicaKind, check_fit
from jaxlora.scheduler.replicas.steps import Steps

type Planner = Callable[
    [Sequence[ReplicaKind], int, Sequence[np.ndarray]], PlannedDeployment
]


def best_uniform(
    kinds: Sequence[ReplicaKind],
    num_gpus: int,
    batches: Sequence[np.ndarray],
    longest: int = 0,
) -> PlannedDeployment:
    """Chooses the best replicas of one kind, which must hold the longest sample.

    Its `bound` is that of this deployment. See `plan_deployment`.

    Raises:
        ValueError: The longest sample fits into no replica that the GPUs suffice for.
    """
    batches = [np.asarray(batch) for batch in batches if len(batch)]
    kinds = [k for k in kinds if k.num_gpus <= num_gpus]
    longest = check_fit(kinds, batches, longest)
    found = []
    for kind in kinds:
        if kind.longest >= longest:
            one = Deployment(kinds=(kind,), counts=(num_gpus // kind.num_gpus,))
            bound = float(Steps((kind,), batches).bounds(one.counts).mean())
            found.append(try_steps(one, batches, bound, bound))
    return min(found, key=lambda one: one.seconds)


def one_after_another(
    kinds: Sequence[ReplicaKind],
    num_gpus: int,
    jobs: Sequence[Sequence[np.ndarray]],
    plan: Planner,
) -> float:
    """Returns the mean seconds of a step of each job, one job after the other.

    Args:
        kinds: Kinds of replicas to choose from.
        num_gpus: Number of GPUs, all of which each job has to itself.
        jobs: For each job, the lengths of its samples in each step; none in steps in
            which it does not take part.
        plan: How the replicas of a job are chosen: `best_uniform` or `plan_deployment`.

    Raises:
        ValueError: A sample fits into no replica.
    """
    seconds = 0.0
    for steps in jobs:
        own = [batch for batch in steps if len(batch)]
        if own:
            share = len(own) / len(steps)
            seconds += share * plan(kinds, num_gpus, own).seconds
    return seconds

"""Deploys replicas of any shape for the jobs of a run, as if all could be trained.

Short samples run on many small replicas and long ones on few large ones. `scheduler`
has the planner; here are the steps of the jobs, and the kinds of replicas of a machine.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxlora.errors import ConfigError
from jaxlora.models.options import Remat
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.replicas.kinds import ReplicaModel
from jaxlora.plan.run_plan import RunPlan
from jaxlora.scheduler.replicas import (
    PlannedDeployment,
    SimulatedSteps,
    best_uniform,
    one_after_another,
    plan_deployment,
    simulate_steps,
)

_STEPS = 100  # that the deployment is chosen for, as in LobRA
_SIMULATED = 20


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlannedReplicas:
    """The replicas of a run, and other ways to train the same jobs.

    Attributes:
        planned: The deployment.
        uniform: The best replicas of one kind.
        apart: Seconds of a step of every job, one job after the other, each on its best
            replicas of one kind; None: there is one job.
        by_job: Steps in which a job waits for its own samples.
        by_step: The same steps, in which all jobs wait for all samples.
        names: Names of the jobs.
        num_gpus: Number of GPUs.
        remat: Part of each layer that the backward pass recomputes.
        is_measured: Whether times follow a profile, not the data sheet.
    """

    planned: PlannedDeployment
    uniform: PlannedDeployment
    apart: float | None
    by_job: SimulatedSteps
    by_step: SimulatedSteps
    names: tuple[str, ...]
    num_gpus: int
    remat: Remat
    is_measured: bool


def plan_replicas(
    plan: RunPlan, jobs: Sequence[PreparedJob], machine: Machine, remat: Remat
) -> PlannedReplicas | None:
    """Plans the replicas of prepared jobs.

    Args:
        plan: The plan of the run. Its mesh does not matter.
        jobs: The jobs.
        machine: The GPUs.
        remat: Part of each layer that the backward pass recomputes.

    Returns:
        The plan; None: the rates of the device are not known.

    Raises:
        ConfigError: A sample fits into no replica.
    """
    if not plan.rates.are_known:
        return None
    steps, num_gpus = _steps(jobs, plan.num_slots), machine.num_devices
    lengths = np.concatenate([own for step in steps for own in step]).astype(float)
    longest = max(job.longest_group for job in jobs)
    available = machine.memory_of(num_gpus)
    kinds = ReplicaModel(
        spec=plan.spec.with_remat(remat),
        rates=machine.rates(plan.spec, plan.config.network_gbits),
        free_bytes=None if available is None else available.num_bytes,
        num_gpus=num_gpus,
        block_tokens=plan.config.block_tokens,
        capacity=max(plan.config.limits.capacity, longest),
        mean_tokens=float((lengths**2).sum() / lengths.sum()),
    ).kinds()
    demand = kinds, num_gpus, [np.concatenate(step) for step in steps], longest
    try:
        planned = plan_deployment(*demand)
    except ValueError as error:
        raise ConfigError(f"replicas: {error}") from error
    apart = None
    if len(jobs) > 1:
        of_job = [[step[job] for step in steps] for job in range(len(jobs))]
        apart = one_after_another(kinds, num_gpus, of_job, best_uniform)
    first, deployment = steps[:_SIMULATED], planned.deployment
    return PlannedReplicas(
        planned=planned,
        uniform=best_uniform(*demand),
        apart=apart,
        by_job=simulate_steps(deployment, first),
        by_step=simulate_steps(deployment, first, barrier="step"),
        names=tuple(job.name for job in jobs),
        num_gpus=num_gpus,
        remat=remat,
        is_measured=plan.rates.profile is not None,
    )


def _steps(jobs: Sequence[PreparedJob], num_slots: int) -> list[list[np.ndarray]]:
    """Returns lengths of the samples of each job in steps from all of its training.

    If there are more jobs than slots, each step has as many jobs as there are slots:
    jobs with more optimizer steps are in more of them.
    """
    rng = np.random.default_rng(0)
    weights = np.array([job.num_steps for job in jobs], float)
    steps = []
    for number in range(_STEPS):
        size = min(num_slots, len(jobs))
        running = rng.choice(len(jobs), size, replace=False, p=weights / weights.sum())
        step = [np.empty(0, int)] * len(jobs)
        for at in running:
            job = jobs[at]
            step[at] = np.array(job.lengths(number * job.num_steps // _STEPS))
        steps.append(step)
    return steps

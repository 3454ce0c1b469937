"""Plans replicas of different shapes for the jobs of a run (`replicas: auto`).

Short samples run on many small replicas and long ones on few large ones. `scheduler`
has the planner; here are the steps of the jobs, and the kinds of replicas of a machine.
"""

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console

from jaxlora.common.console import show
from jaxlora.common.note import log_notes
from jaxlora.config import RunConfig
from jaxlora.costs.gpus import GpuMachine
from jaxlora.errors import ConfigError
from jaxlora.memory.gpu_share import SHARE
from jaxlora.models.layer import Remat
from jaxlora.pallas_kernels.device import planned_for
from jaxlora.scheduler.replicas import (
    PlannedDeployment,
    SimulatedSteps,
    best_uniform,
    one_after_another,
    plan_deployment,
    simulate_steps,
)
from jaxlora.scheduler.replicas.report import draw_steps, replica_table, step_table
from jaxlora.sharding.mesh_sizes import ONE_DEVICE
from jaxlora.train.plan.auto_mesh.machine import Machine, this_machine
from jaxlora.train.plan.auto_replicas.kinds import ReplicaModel
from jaxlora.train.plan.prepare_run import prepare_run
from jaxlora.train.plan.prepared_job import PreparedJob, longest_group
from jaxlora.train.plan.run_plan import RunPlan

# With remat: auto, the fastest of these is taken.
_REMATS: tuple[Remat, ...] = ("none", "mlp", "layer")
_CAPACITY = 8192  # tokens of a microbatch, at least, if the run leaves them open
_STEPS = 100  # that the deployment is chosen for, as in LobRA
_SIMULATED = 20
_DRAWN = 3


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


def plan_run_replicas(
    config: RunConfig, machine: GpuMachine | None = None
) -> PlannedReplicas | None:
    """Plans the replicas of a run.

    Args:
        config: The run. Its mesh does not matter.
        machine: GPUs to plan for; None: those of this machine.

    Returns:
        The plan; None: the rates of the device are not known.

    Raises:
        JaxloraError: The run cannot be trained.
    """
    log_notes(config.notes)
    remats = _REMATS if config.remat == "auto" else (config.weakest_remat,)
    tokens = config.microbatch_tokens
    if not isinstance(tokens, int):
        longest = max(job.max_length for job in config.jobs)
        blocks = -(-max(_CAPACITY, longest) // config.block_tokens)
        tokens = blocks * config.block_tokens
    # Memory is looked at for each kind of replica, not for a mesh.
    given = {"remat": remats[0], "microbatch_tokens": tokens}
    given |= {"microbatch_shapes": (), "replicas": None}
    config = config.replace(mesh=ONE_DEVICE, **given)
    planned = contextlib.nullcontext()
    if machine is not None:
        planned = planned_for(machine.planned(SHARE))
    with planned:
        run = prepare_run(config, None, datetime.datetime.now().isoformat())
        here = this_machine()
        found = [plan_replicas(run.plan, run.jobs, here, remat) for remat in remats]
    return min(filter(None, found), key=lambda one: one.planned.seconds, default=None)


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
    steps = _steps(jobs, plan.num_slots)
    batches = [np.concatenate(step) for step in steps]
    lengths = np.concatenate(batches).astype(float)
    longest = max(map(longest_group, jobs))
    num_gpus, available = machine.num_devices, machine.memory_of(machine.num_devices)
    kinds = ReplicaModel(
        spec=plan.spec.with_remat(remat),
        rates=machine.rates(plan.spec, plan.config.network_gbits),
        free_bytes=None if available is None else available.num_bytes,
        num_gpus=num_gpus,
        block_tokens=plan.config.block_tokens,
        capacity=max(plan.config.limits.capacity, longest),
        mean_tokens=float((lengths**2).sum() / lengths.sum()),
    ).kinds()
    try:
        planned = plan_deployment(kinds, num_gpus, batches, longest)
    except ValueError as error:
        raise ConfigError(f"replicas: {error}") from error
    apart = None
    if len(jobs) > 1:
        of_job = [[step[job] for step in steps] for job in range(len(jobs))]
        apart = one_after_another(kinds, num_gpus, of_job, best_uniform)
    first, deployment = steps[:_SIMULATED], planned.deployment
    return PlannedReplicas(
        planned=planned,
        uniform=best_uniform(kinds, num_gpus, batches, longest),
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


# ---- showing -------------------------------------------------------------------------


def _notes(replicas: PlannedReplicas) -> Iterator[str]:
    by_job, by_step = replicas.by_job, replicas.by_step
    yield (
        f"idle: {by_job.gpus_idle:.1%} of the GPUs' time if a job waits for its own "
        f"samples, {by_step.gpus_idle:.1%} if all jobs wait for all samples"
    )
    if replicas.is_measured:
        yield "Times follow what `jaxlora profile` measured."
    else:
        yield "Times are estimates from the GPU's data sheet."
    if any(kind.tensor > 1 for kind in replicas.planned.deployment.kinds):
        yield (
            "Replicas with tensor parallelism have not been measured: their time and "
            "memory are those of one GPU, divided, with the all-reduces of each layer."
        )


def print_replicas(replicas: PlannedReplicas, console: Console) -> None:
    """Prints the deployment beside its bound and other ways to train the jobs."""
    uniform = replicas.uniform
    others = {f"alike: {uniform.deployment}": uniform.seconds}
    if replicas.apart is not None:
        others["one job after the other"] = replicas.apart
    for text in (
        f"replicas for {replicas.num_gpus} GPUs: {replicas.planned.deployment}, "
        f"remat {replicas.remat}",
        "",
        step_table(replicas.planned, others, replicas.num_gpus),
        "",
        replica_table(replicas.by_job),
        *_notes(replicas),
    ):
        show(console, text, soft_wrap=True)


def draw_replicas(replicas: PlannedReplicas, path: str | os.PathLike) -> str:
    """Draws the first steps, with a barrier for each job and for each step.

    Returns:
        What is in it, in words.
    """
    simulated = {
        "a job waits for its own samples": replicas.by_job,
        "all jobs wait for all samples": replicas.by_step,
    }
    ends = [part.end for part in replicas.by_step.parts if part.step < _DRAWN]
    names = dict(enumerate(replicas.names))
    draw_steps(simulated, path, names=names, until=max(ends))
    return f"the first {_DRAWN} steps on the replicas"

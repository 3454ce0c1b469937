"""Plans replicas of different shapes for the jobs of a run (`--replicas auto`)."""

import contextlib
import os
from collections.abc import Iterator

from rich.console import Console

from jaxlora.common.console import show
from jaxlora.common.note import log_notes
from jaxlora.config import RunConfig
from jaxlora.costs.gpus import GpuMachine
from jaxlora.models.options import Remat
from jaxlora.pallas_kernels.device import planned_for
from jaxlora.plan.job.prepare_run import prepare_run
from jaxlora.plan.memory.gpu_share import SHARE
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.plan.replicas.deployment import PlannedReplicas, plan_replicas
from jaxlora.scheduler.replicas.report import draw_steps, replica_table, step_table
from jaxlora.sharding.mesh_sizes import ONE_DEVICE
from jaxlora.train.saved.continue_job import continued_step

# With remat: auto, the fastest of these is taken.
_REMATS: tuple[Remat, ...] = ("none", "mlp", "layer")
_CAPACITY = 8192  # tokens of a microbatch, at least, if the run leaves them open
_DRAWN = 3


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
        plan, jobs, _ = prepare_run(config, continued_step)
        here = this_machine()
        found = [plan_replicas(plan, jobs, here, remat) for remat in remats]
    return min(filter(None, found), key=lambda one: one.planned.seconds, default=None)


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
            "Replicas with tensor parallelism have not been measured: their time is "
            "that of one GPU, divided, with the exchanges of each layer."
        )
    if any(kind.stage > 1 for kind in replicas.planned.deployment.kinds):
        yield "A list of replicas in a run file has none with pipeline stages."


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

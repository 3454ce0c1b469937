"""Chooses the settings of a run that are `auto`, and refuses what cannot be trained.

`jaxlora plan` and the trainer both call `settle_run`, so they refuse the same runs.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence

from jaxlora.config import RunConfig
from jaxlora.memory.bounds import Bounds
from jaxlora.memory.capacity import settle
from jaxlora.memory.device import device_memory
from jaxlora.memory.mesh import MeshStages, resident_footprint
from jaxlora.memory.weight_copies import choose_copies
from jaxlora.models.spec import DecoderSpec
from jaxlora.sharding.mesh_sizes import ONE_DEVICE
from jaxlora.train import prepare
from jaxlora.train.auto_mesh.candidates import Candidates, Demand
from jaxlora.train.auto_mesh.choose import choose_mesh
from jaxlora.train.auto_mesh.machine import this_machine
from jaxlora.train.continue_job import continued_step
from jaxlora.train.low_fill import warn_of_low_fill
from jaxlora.train.mesh_plan import plan_mesh
from jaxlora.train.next_window import JobPosition
from jaxlora.train.planned_model import PlannedModel
from jaxlora.train.prepared_job import PreparedJob

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SettledRun:
    """A run that can be trained, as far as is known without its weights.

    Attributes:
        config: The run; none of `mesh`, `microbatch_tokens` and `remat` is `auto`.
        spec: The decoder with the slots of the jobs.
        bounds: Bounds of the capacity of microbatches.
    """

    config: RunConfig
    spec: DecoderSpec
    bounds: Bounds


def settle_run(
    config: RunConfig, model: PlannedModel, jobs: Sequence[PreparedJob]
) -> SettledRun:
    """Chooses the capacity, `remat`, kernels and attention of a run, and checks them.

    Args:
        config: The run; its mesh is not `auto`.
        model: The base model.
        jobs: Jobs of the run.

    Raises:
        ConfigError: The mesh does not fit the devices or the model, no kernels or
            attention can run the model here, the slots or a microbatch cannot hold a
            job, or the run does not fit into memory by estimate.
    """
    plan_mesh(config, model.config)
    bounds = _bounds(config, jobs)
    spec = choose_copies(config, _spec(config, model, jobs, bounds), bounds)
    for job in jobs:
        prepare.check_fits(job, spec)
    is_auto = bounds.fixed is None and config.mesh_sizes.num_devices > 1
    config = settle(config, spec, bounds)
    if is_auto:
        config = _with_fastest_capacity(config, spec, bounds, jobs)
        bounds = dataclasses.replace(bounds, largest=config.limits.capacity)
    warn_of_low_fill(config, bounds)
    spec = spec.with_remat(config.least_remat)
    return SettledRun(config=config, spec=spec, bounds=bounds)


def settle_mesh(
    config: RunConfig, model: PlannedModel, jobs: Sequence[PreparedJob]
) -> RunConfig:
    """Replaces the settings that are `auto` and that the places of weights depend on.

    These are `mesh: auto` and, on a mesh with stages, `remat: auto`.

    Args:
        config: The run.
        model: The base model.
        jobs: Jobs of the run.

    Raises:
        ConfigError: No mesh of this machine has enough memory.
    """
    if config.mesh == "auto":
        config = _with_mesh(config, model, jobs)
    if config.remat == "auto" and config.mesh_sizes.stage > 1:
        config = config.replace(remat=settle_run(config, model, jobs).config.remat)
    return config


def _with_mesh(
    config: RunConfig, model: PlannedModel, jobs: Sequence[PreparedJob]
) -> RunConfig:
    """Replaces `mesh: auto`, and `remat: auto` with it."""
    demand = _demand(jobs, lambda config: _bounds(config, jobs))
    bounds = _bounds(config.replace(mesh=ONE_DEVICE), jobs)
    spec = _spec(config, model, jobs, bounds)
    choice = choose_mesh(config, spec, demand, this_machine())
    logger.info("%s", choice.reason)
    if config.samples is not None:
        config.samples.check_mesh(choice.sizes)
    return config.replace(mesh=str(choice.sizes), remat=choice.remat)


def _with_fastest_capacity(
    config: RunConfig,
    spec: DecoderSpec,
    bounds: Bounds,
    jobs: Sequence[PreparedJob],
) -> RunConfig:
    """Returns the run with the capacity that is predicted to be fastest on its mesh.

    Args:
        config: The run, with the largest capacity that fits.
        spec: The decoder.
        bounds: Bounds of the capacity.
        jobs: Jobs of the run.
    """
    largest = config.limits.capacity
    most = dataclasses.replace(bounds, largest=largest)
    spec = spec.with_remat(config.least_remat)
    held = resident_footprint(MeshStages.of(config, spec)).stages[0].base_bytes
    machine = this_machine()
    machine = dataclasses.replace(
        machine, memory=device_memory(held, config.mesh_sizes.num_devices)
    )
    candidates = Candidates(_demand(jobs, lambda _: most), machine)
    found, _ = candidates.fastest(candidates.at(config, spec, most))
    if found.tokens != largest:
        logger.info(
            "microbatch_tokens: auto: %d, predicted to be faster than %d",
            found.tokens,
            largest,
        )
    return config.replace(microbatch_tokens=found.tokens)


def _demand(
    jobs: Sequence[PreparedJob], bounds: Callable[[RunConfig], Bounds]
) -> Demand:
    return Demand(
        positions=first_positions(jobs),
        lengths=lambda job, step: jobs[job].lengths(step),
        bounds=bounds,
    )


def _bounds(config: RunConfig, jobs: Sequence[PreparedJob]) -> Bounds:
    held_out = [job.eval_data for job in jobs if job.eval_data is not None]
    return Bounds.of(config, [job.train_data for job in jobs], held_out)


def _spec(
    config: RunConfig, model: PlannedModel, jobs: Sequence[PreparedJob], bounds: Bounds
) -> DecoderSpec:
    ranks = [job.ranks for job in jobs]
    train = [job.train_data for job in jobs]
    return prepare.spec_of(config, model, ranks, train, bounds.max_tokens)


def first_positions(jobs: Sequence[PreparedJob]) -> list[JobPosition]:
    """Returns the positions at the start of the run of the jobs that have steps.

    Raises:
        CheckpointError: A checkpoint that a job continues from cannot be used.
    """
    positions = [
        JobPosition(
            job=i,
            priority=j.job.priority,
            slot=None,
            step=continued_step(j.job),
            num_steps=j.num_steps,
            batch_tokens=j.batch_tokens,
        )
        for i, j in enumerate(jobs)
    ]
    return [p for p in positions if p.step < p.num_steps]

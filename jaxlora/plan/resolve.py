"""Decides all that is `auto` in a run, once, before its weights are loaded."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from jaxlora.adapters.files.expert_tensors import unread_layout
from jaxlora.common.garbage import no_garbage_collection
from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.config.sweep_config import Sweep
from jaxlora.costs.device_profile import find_profile
from jaxlora.errors import ConfigError
from jaxlora.models.config import is_of_expert
from jaxlora.models.slot_modules import SLOT_MODULES
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linear_names
from jaxlora.plan.job.planned_model import PlannedModel, describe_base
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.job.slot_spec import needed
from jaxlora.plan.memory.bounds import low_fill
from jaxlora.plan.mesh.candidates import Search
from jaxlora.plan.mesh.choose import choose
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.mesh.predict import padding_share
from jaxlora.plan.run_plan import RunPlan, Shapes
from jaxlora.plan.stages import check_division
from jaxlora.sharding.mesh_sizes import MeshSizes

_LEAST_SHARE = 0.01  # of padding; 0 is not a setting


@no_garbage_collection()  # its estimates trace decoders
def resolve(
    config: RunConfig,
    model: PlannedModel,
    jobs: Sequence[PreparedJob],
    machine: Machine,
    on_accepted: Callable[[], None] = lambda: None,
    ended: Collection[str] = (),
) -> RunPlan:
    """Decides all that is `auto`, and refuses what cannot be trained; logs nothing.

    Args:
        config: The run.
        model: The base model.
        jobs: Jobs of the run.
        machine: The machine that the run is for.
        on_accepted: Is called when a run on one device can no longer be refused; what
            follows are estimates, which may take seconds. Only if the device's memory
            is known.
        ended: Names of those of the jobs that have ended, and need not be held.

    Raises:
        ConfigError: The mesh does not fit the devices or the model, no mesh has enough
            memory, no kernels or attention can run the model here, the slots or a
            microbatch cannot hold a job, or the run does not fit into memory by
            estimate; or a sweep compares losses on different samples; or no other
            program would read the folders.
    """
    check_comparable(config.sweep, jobs)
    names = linear_names(model.config)
    if (reason := unread_layout(config.expert_layout, names)) is not None:
        raise ConfigError(reason)
    adapted = {name for job in jobs for name in job.adapted}
    jobs = [job for job in jobs if job.name not in ended]
    if shapes := config.replica_shapes:
        own = MeshSizes(tensor=shapes[0].tensor)
        config = config.replace(microbatch_tokens=shapes[0].tokens, mesh=str(own))
    is_open = config.mesh == "auto" or config.has_open_replicas
    if not is_open:
        _check_mesh(config, model, machine)
        _check_adapters(config, model, jobs)
    # Meshes and capacities are compared by plans that take milliseconds each.
    asked, config = config.padding_share, config.replace(padding_share=1.0)
    search = Search(config=config, model=model, jobs=jobs, machine=machine)
    plan = choose(search, on_accepted)
    _check_sharing(config, adapted, plan.spec)
    share, padding_notes = _padding_share(asked, plan)
    plan = dataclasses.replace(plan, config=plan.config.replace(padding_share=share))
    if is_open:
        _check_mesh(plan.config, model, machine)
        _check_adapters(plan.config, model, jobs)
    notes = [*plan.notes, *padding_notes]
    if (most := plan.spec.options.most_adapters) is not None:
        split = ""
        if config.packer != "joint":
            split = f"; what the packer {config.packer} makes is split so"
        notes.append(
            Note(
                f"adapters_per_microbatch: at most {most} of {plan.num_slots} adapters "
                f"share a microbatch, as each fills whole blocks of each expert's rows"
                f"{split}"
            )
        )
    if plan.spec.options.base_format is not None:
        notes.append(Note(f"base: {describe_base(plan.spec)}"))
    if machine.profiles:
        notes.append(Note(find_profile(machine.profiles, plan.spec)[1]))
    shapes = Shapes.of(plan.config, plan.stages, plan.rates)
    if not shapes.tokens:
        notes += low_fill(plan.config, plan.bounds)
    return dataclasses.replace(
        plan, shapes=shapes, ended=tuple(ended), notes=tuple(notes)
    )


def _check_sharing(
    config: RunConfig, adapted: Collection[str], spec: DecoderSpec
) -> None:
    """Checks that a run adapts experts if it says how many adapters share rows of them.

    Args:
        config: The run.
        adapted: Names of the linears of all jobs; a run goes on when some have ended.
        spec: The decoder with the slots, which may be for further linears.
    """
    adapts_experts = spec.expert_slots is not None or any(map(is_of_expert, adapted))
    if config.changes("adapters_per_microbatch") and not adapts_experts:
        raise ConfigError(
            f"adapters_per_microbatch is {config.adapters_per_microbatch}, and no job "
            "of the run adapts experts, nor do slot_targets: microbatches may have "
            "rows of any number of other adapters. Leave it out."
        )


def _padding_share(
    asked: float | Literal["auto"], plan: RunPlan
) -> tuple[float, list[Note]]:
    """Returns the share of padding that microbatches are packed by, and why.

    Args:
        asked: `padding_share` of the run.
        plan: Its plan.
    """
    share, source = 1.0, ""
    if asked != "auto":
        share, source = asked, "as the run has it"
    elif plan.stages.sizes.stage > 1:
        share, source = padding_share(plan.spec, plan.rates)
        share = max(_LEAST_SHARE, share)
    if plan.stages.sizes.stage > 1:
        text = f"packed as if a row of padding took {share:g} of a token's time"
        return share, [Note(f"padding_share: {text}, {source}")]
    if share < 1:  # no pipeline fills or drains
        text = f"{share:g} changes nothing, as the mesh has one stage"
        return share, [Note(f"padding_share: {text}")]
    return share, []


def check_comparable(sweep: Sweep | None, jobs: Sequence[PreparedJob]) -> None:
    """Checks that the rules of a sweep compare losses on the same held-out samples.

    Args:
        sweep: The sweep of a run, if it has one.
        jobs: Its jobs, and those that are about to join.

    Raises:
        ConfigError: Two jobs hold out different samples.
    """
    if sweep is None or not sweep.early_exit:
        return
    first: dict[str | None, str] = {}
    for job in jobs:
        if job.eval_data is not None:
            first.setdefault(job.fingerprints["eval_data_fingerprint"], job.name)
    if len(first) > 1:
        one, other, *_ = first.values()
        raise ConfigError(
            f"configurations {one!r} and {other!r} are evaluated on different samples, "
            "so their losses cannot be compared. Give all configurations the same "
            "held-out records and the same max_length (eval_data, or eval_fraction of "
            "the same data by the same eval_seed), or set `early_exit: none`."
        )


def _check_mesh(config: RunConfig, model: PlannedModel, machine: Machine) -> None:
    sizes, replicas = config.mesh_sizes, config.replica_shapes
    wanted, where = config.num_devices, "replicas" if replicas else "mesh"
    if replicas and wanted > machine.num_devices:
        raise ConfigError(
            f"replicas: {len(replicas)} replicas need {wanted} devices, and this "
            f"machine has {machine.num_devices}. Lower a count, or run it where there "
            "are more."
        )
    try:
        sizes.check_fits(machine.num_devices)
        for own in {sizes, *(MeshSizes(tensor=one.tensor) for one in replicas)}:
            check_division(model.config, model.dtype, own, model.base_format)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if config.block_tokens % sizes.tensor:
        raise ConfigError(
            f"mesh: tensor={sizes.tensor} does not divide block_tokens="
            f"{config.block_tokens}, and its devices divide the rows of microbatches. "
            f"Set block_tokens to a multiple of {sizes.tensor}, or another mesh."
        )


def _check_adapters(
    config: RunConfig, model: PlannedModel, jobs: Sequence[PreparedJob]
) -> None:
    """Refuses rows and copies that the mesh cannot divide, or that two stages need."""
    sizes, replicas = config.mesh_sizes, config.replica_shapes
    tensor = max([sizes.tensor, *(one.tensor for one in replicas)])
    for job in jobs:
        trained = [SLOT_MODULES[name] for name, _ in needed(job).outside]
        if tensor > 1 and any(module.is_whole for module in trained):
            cure = f"a mesh without it, not {sizes}"
            if replicas:
                cure = "replicas without it"
            raise ConfigError(
                f"job {job.name!r} has modules_to_save, which meshes with the axis "
                f"tensor do not support. Set {cure}."
            )
        has_rows = any(module.has_tokens for module in trained)
        if sizes.stage > 1 and has_rows and model.config.tie_embeddings:
            raise ConfigError(
                f"job {job.name!r} has trainable_token_indices, and the head of this "
                "base is tied to its embedding, which is on another pipeline stage. "
                f"Set a mesh of one stage, not {sizes}."
            )

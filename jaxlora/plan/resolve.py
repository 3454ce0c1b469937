"""Decides all that is `auto` in a run, once, before its weights are loaded."""

import dataclasses
from collections.abc import Callable, Collection, Sequence

from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.config.sweep_config import Sweep
from jaxlora.costs.device_profile import find_profile
from jaxlora.costs.work import layer_work
from jaxlora.errors import ConfigError
from jaxlora.models.spec import DecoderSpec
from jaxlora.plan.job.job_slots import JobPosition
from jaxlora.plan.job.planned_model import PlannedModel, describe_base
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.job.slot_spec import check_fits, decoder_spec, needed
from jaxlora.plan.memory import capacity
from jaxlora.plan.memory.base_storage import choose_storage
from jaxlora.plan.memory.bounds import Bounds, low_fill
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.plan.mesh.candidates import Candidates, Demand
from jaxlora.plan.mesh.choose import choose_mesh
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.replicas.choose import ReplicaLists
from jaxlora.plan.replicas.room import RoomFinder
from jaxlora.plan.run_plan import RunPlan, Shapes, laid_out
from jaxlora.plan.stages import MeshStages, check_division
from jaxlora.programs.program import no_garbage_collection
from jaxlora.sharding.mesh_sizes import ONE_DEVICE, MeshSizes

# With fewer operations in a layer's forward pass over a microbatch, an H200 waits for
# its host, which takes 0.7 ms for each layer and pass to call a chain's programs.
_LEAST_FLOPS = 8e11


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
            estimate; or a sweep compares losses on different samples.
    """
    check_comparable(config.sweep, jobs)
    jobs = [job for job in jobs if job.name not in ended]
    chooses_remat, notes = config.remat == "auto", []
    if config.has_open_replicas:
        config, note = _with_replicas(config, model, jobs, machine)
        notes.append(note)
    if shapes := config.replica_shapes:
        own = MeshSizes(tensor=shapes[0].tensor)
        config = config.replace(microbatch_tokens=shapes[0].tokens, mesh=str(own))
    if config.mesh == "auto":
        config, note = _with_mesh(config, model, jobs, machine)
        notes.append(note)
    _check_mesh(config, model, machine)
    _check_adapters(config, model, jobs)
    if config.remat == "auto" and config.mesh_sizes.stage > 1:
        # Stages are divided for one `remat`, so it is chosen before their capacity.
        draft = _draft(config, model, jobs, machine)
        config, note = draft.with_remat()
        notes.append(note)
    draft = _draft(config, model, jobs, machine)
    plan = draft.finish(on_accepted)
    # Stages may have settled it by an estimate.
    bounds = plan.bounds.with_remats() if chooses_remat else plan.bounds
    notes += plan.notes
    return dataclasses.replace(
        plan, bounds=bounds, ended=tuple(ended), notes=tuple(notes)
    )


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


def _with_mesh(
    config: RunConfig,
    model: PlannedModel,
    jobs: Sequence[PreparedJob],
    machine: Machine,
) -> tuple[RunConfig, Note]:
    """Replaces `mesh: auto`, and `remat: auto` with it; returns the reason too."""
    alone = config.replace(mesh=ONE_DEVICE)
    spec, _ = decoder_spec(alone, model, jobs, run_bounds(alone, jobs).max_tokens)
    demand = _demand(jobs, lambda config: run_bounds(config, jobs))
    choice = choose_mesh(config, spec, demand, machine)
    config = config.replace(mesh=str(choice.sizes), remat=choice.remat)
    return config, Note(choice.reason)


def _with_replicas(
    config: RunConfig,
    model: PlannedModel,
    jobs: Sequence[PreparedJob],
    machine: Machine,
) -> tuple[RunConfig, Note]:
    """Chooses replicas, or their sizes, and `remat: auto`; returns the reason too."""
    replicas = config.replicas
    alone = config.replace(replicas=None)
    bounds = run_bounds(alone, jobs)
    spec, _ = decoder_spec(alone, model, jobs, bounds.max_tokens)
    if replicas is None or replicas == "auto":
        positions = first_positions(jobs)
        lists = ReplicaLists(model, spec, jobs, positions, bounds, machine)
        return lists.choose(alone)
    return RoomFinder(spec, bounds, machine).sized(alone, replicas)


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
        slots = needed(job)
        if slots.whole_modules and tensor > 1:
            cure = f"a mesh without it, not {sizes}"
            if replicas:
                cure = "replicas without it"
            raise ConfigError(
                f"job {job.name!r} has modules_to_save, which meshes with the axis "
                f"tensor do not support. Set {cure}."
            )
        has_rows = slots.num_token_rows or slots.num_head_rows
        if sizes.stage > 1 and has_rows and model.config.tie_embeddings:
            raise ConfigError(
                f"job {job.name!r} has trainable_token_indices, and the head of this "
                "base is tied to its embedding, which is on another pipeline stage. "
                f"Set a mesh of one stage, not {sizes}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Draft:
    """A run on its mesh, of which a `remat` or a capacity may still be `auto`."""

    config: RunConfig
    model: PlannedModel
    jobs: Sequence[PreparedJob]
    machine: Machine
    spec: DecoderSpec
    bounds: Bounds
    notes: tuple[Note, ...]

    @property
    def available(self) -> DeviceMemory | None:
        return self.machine.memory_of(self.config.num_devices)

    def resolved(
        self, on_accepted: Callable[[], None] = lambda: None
    ) -> capacity.Resolved:
        """Returns the run with the capacity and the `remat` that are estimated best."""
        stages = MeshStages.of(self.config, self.spec)
        return capacity.resolve_auto(
            self.config, stages, self.bounds, self.available, on_accepted
        )

    def with_remat(self) -> tuple[RunConfig, Note]:
        """Replaces `remat: auto`; returns the reason too."""
        found = self.resolved()
        why = found.notes[0]
        return self.config.replace(remat=found.config.remat), why

    def finish(self, on_accepted: Callable[[], None]) -> RunPlan:
        """Chooses the capacity, and lays the run out; see `resolve`."""
        found, bounds = self.resolved(on_accepted), self.bounds
        config, notes = found.config, [*self.notes, *found.notes]
        if bounds.fixed is None and config.mesh_sizes.num_devices > 1:
            config, faster = self._with_fastest_capacity(config)
            notes += faster
            bounds = dataclasses.replace(bounds, largest=config.limits.capacity)
        spec = self.spec.with_remat(config.weakest_remat)
        if spec.options.base_format is not None:
            notes.append(Note(f"base: {describe_base(spec)}"))
        if self.machine.profiles:
            notes.append(Note(find_profile(self.machine.profiles, spec)[1]))
        rates = self.machine.rates(spec, config.network_gbits)
        plan = laid_out(config, self.model, spec, self.jobs, bounds, rates)
        shapes = Shapes.of(config, plan.stages, rates)
        if not shapes.tokens:
            notes += low_fill(config, bounds)
        notes += plan.notes
        return dataclasses.replace(plan, shapes=shapes, notes=tuple(notes))

    def _with_fastest_capacity(self, config: RunConfig) -> tuple[RunConfig, list[Note]]:
        """Returns the run with the capacity that is predicted to be fastest on a mesh.

        Args:
            config: The run, with the largest capacity that fits.
        """
        largest = config.limits.capacity
        most = dataclasses.replace(self.bounds, largest=largest)
        spec = self.spec.with_remat(config.weakest_remat)
        demand = _demand(self.jobs, lambda _: most)
        candidates = Candidates(demand, self.machine, self.available)
        found, _ = candidates.fastest(candidates.at(config, spec, most))
        if found.tokens == largest:
            return config, []
        why = f"{found.tokens}, predicted to be faster than {largest}"
        config = config.replace(microbatch_tokens=found.tokens)
        return config, [Note(f"microbatch_tokens: auto: {why}")]


def _draft(
    config: RunConfig,
    model: PlannedModel,
    jobs: Sequence[PreparedJob],
    machine: Machine,
) -> _Draft:
    bounds = run_bounds(config, jobs)
    spec, choices = decoder_spec(config, model, jobs, bounds.max_tokens)
    available = machine.memory_of(config.num_devices)
    spec, storage = choose_storage(config, spec, bounds, available)
    if config.layers_per_program == "auto" and not _hides_calls(spec, bounds):
        config = config.replace(layers_per_program=spec.config.num_layers)
    for job in jobs:
        check_fits(job, spec, bounds.max_tokens)
    return _Draft(
        config=config,
        model=model,
        jobs=jobs,
        machine=machine,
        spec=spec,
        bounds=bounds,
        notes=(Note(choices), *storage),
    )


def _hides_calls(spec: DecoderSpec, bounds: Bounds) -> bool:
    """Returns whether the device takes longer for a layer's pass than the host.

    If not, a step of a decoder in several programs would wait for the host.
    """
    work = layer_work(spec, spec.config.num_layers // 2, bounds.sample_tokens)
    return work.forward.flops * bounds.max_tokens >= _LEAST_FLOPS


def _demand(
    jobs: Sequence[PreparedJob], bounds: Callable[[RunConfig], Bounds]
) -> Demand:
    return Demand(
        positions=first_positions(jobs),
        lengths=lambda job, step: jobs[job].lengths(step),
        bounds=bounds,
    )


def run_bounds(config: RunConfig, jobs: Sequence[PreparedJob]) -> Bounds:
    """Returns the bounds of a run's capacity for these jobs; its mesh is not `auto`."""
    settings = [job.settings for job in jobs]
    held_out = [job.eval_data for job in jobs if job.eval_data is not None]
    return Bounds.of(config, settings, [job.train_data for job in jobs], held_out)


def first_positions(jobs: Sequence[PreparedJob]) -> list[JobPosition]:
    """Returns the positions at the start of the run of the jobs that have steps."""
    positions = [
        JobPosition(
            job=i,
            priority=j.settings.priority,
            slot=None,
            step=j.first_step,
            num_steps=j.num_steps,
            batch_tokens=j.batch_tokens,
        )
        for i, j in enumerate(jobs)
    ]
    return [p for p in positions if p.step < p.num_steps]

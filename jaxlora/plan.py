"""Plans a run without training: its microbatches, their fill, and simulated time.

This needs the tokenizer and the jobs' data, but no weights and no GPU.
"""

import dataclasses
import itertools
import logging
import pathlib
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from jaxlora.adapters.peft_import import import_peft
from jaxlora.adapters.targets import check_ranks, resolve_targets
from jaxlora.auto_mesh.choose import Demand, choose_mesh
from jaxlora.auto_mesh.machine import this_machine
from jaxlora.config import LoraJob, RunConfig
from jaxlora.costs.stages import decoder_seconds, stage_borders
from jaxlora.data.order import JobOrder
from jaxlora.data.tokenize import TokenizedData
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.checkpoint import planned_config
from jaxlora.hf.files import tokenizer_folder
from jaxlora.hf.load import base_dtype
from jaxlora.hf.names import linear_names, linear_path, tensor_specs
from jaxlora.memory.bounds import Bounds
from jaxlora.memory.capacity import settle
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Microbatch,
    Plan,
    Sample,
    Schedule,
    StageCost,
    lower_bound,
)
from jaxlora.scheduler.plan import evaluate
from jaxlora.scheduler.replicas import Load
from jaxlora.sharding.mesh_sizes import ONE_DEVICE, MeshSizes
from jaxlora.train import prepare
from jaxlora.train.continue_job import continued_step
from jaxlora.train.job_run import batch_lengths, job_order
from jaxlora.train.lanes import run_lanes
from jaxlora.train.next_window import (
    JobPosition,
    assign_slots,
    fixed_shape_cost,
    pack_window,
    positions_after,
    window_samples,
)
from jaxlora.train.run_folder import begun_capacity

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class JobData:
    """One job of a plan: its training samples, and its held-out ones, if any."""

    job: LoraJob
    data: TokenizedData
    held_out: TokenizedData | None
    order: JobOrder
    num_steps: int

    def lengths(self, step: int) -> list[int]:
        """Tokens of each sample of the global batch of an optimizer step."""
        return batch_lengths(self.data, self.order, step)

    @property
    def batch_tokens(self) -> float:
        """Mean number of tokens of a global batch."""
        num_samples = len(self.data.samples)
        batch_size = min(self.job.batch_size, num_samples)
        return batch_size * self.data.num_tokens / num_samples


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One window of a run, whose samples are packed together.

    Attributes:
        samples: The samples; a job is identified by its number in the run file.
        schedule: Microbatches of the samples.
        fewest: Lower bound on the number of ticks of any schedule.
        greedy: Microbatches of `packer: greedy`.
    """

    samples: tuple[Sample, ...]
    schedule: Schedule
    fewest: int
    greedy: Schedule


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunPlan:
    """The plan of a run in which no job ends early.

    Attributes:
        jobs: Jobs of the run.
        sizes: Mesh that the plan is for.
        parts: Windows of the run, in the order in which they run.
        whole: The whole run, checked and simulated.
        greedy: The same samples under `packer: greedy`.
    """

    jobs: tuple[JobData, ...]
    sizes: MeshSizes
    parts: tuple[Part, ...]
    whole: Plan
    greedy: Plan

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, without padding."""
        return sum(s.num_tokens for part in self.parts for s in part.samples)

    @property
    def busy(self) -> float:
        """Share of the devices' simulated time that is spent on tokens, not padding."""
        devices = self.sizes.num_devices * self.whole.simulation.makespan
        return self.num_tokens / devices


def plan_run(config: RunConfig, *, steps: int | None = None) -> RunPlan:
    """Plans a run. Time is in units of what a device needs for one token.

    The plan has the same microbatches as the trainer, as long as no job ends early. It
    needs none of the devices of the mesh. A pipeline drains between two windows.

    Args:
        config: The run. If its mesh is `auto`, it is chosen for this machine.
        steps: Number of optimizer steps of each job to plan; None: all.

    Raises:
        JaxloraError: The tokenizer or a job's data cannot be used.
    """
    folder = tokenizer_folder(config.model, config.revision)
    jobs = _read_jobs(config, folder, steps)
    model = planned_config(folder)
    config = _settle(config, model, jobs)
    limits = config.limits
    for job in jobs:
        data, held_out = job.data, job.held_out
        prepare.warn_about_positions(job.job.name, data, held_out, model.max_positions)
        prepare.check_lengths(job.job.name, data, held_out, limits.capacity)
    lanes = _lanes(config, jobs)
    cost = _cost(config, model)
    parts = tuple(_part(config, w, lanes, cost) for w in _windows(config, jobs, lanes))
    return RunPlan(
        jobs=jobs,
        sizes=config.mesh_sizes,
        parts=parts,
        whole=_join([p.schedule for p in parts], parts, lanes, cost),
        greedy=_join([p.greedy for p in parts], parts, lanes, cost),
    )


def _read_jobs(
    config: RunConfig, folder: pathlib.Path, steps: int | None
) -> tuple[JobData, ...]:
    tokenizer = load_tokenizer(folder)
    out = []
    for job in config.jobs:
        data, held_out = prepare.read_data(job, tokenizer)
        order = job_order(job, data)
        num_steps = min(order.num_steps, steps or order.num_steps)
        out.append(
            JobData(
                job=job,
                data=data,
                held_out=held_out,
                order=order,
                num_steps=num_steps,
            )
        )
    return tuple(out)


# ---- the mesh and the capacity -------------------------------------------------------


def settle_mesh(config: RunConfig) -> RunConfig:
    """Returns the run with the mesh that is chosen for this machine, if it is `auto`.

    This reads the tokenizer and the jobs' data, but no weights.

    Raises:
        JaxloraError: The tokenizer or a job's data cannot be used, or no mesh of this
            machine has enough memory.
    """
    if config.mesh != "auto":
        return config
    folder = tokenizer_folder(config.model, config.revision)
    jobs = _read_jobs(config, folder, steps=None)
    begun_with = begun_capacity(config)
    return _with_mesh(config, planned_config(folder), jobs, begun_with)


def _with_mesh(
    config: RunConfig,
    model: ModelConfig,
    jobs: Sequence[JobData],
    begun_with: int | None,
) -> RunConfig:
    """Replaces `mesh: auto`; see `_bounds` for `begun_with`."""
    if config.mesh != "auto":
        return config
    demand = Demand(
        positions=_positions(jobs),
        lengths=lambda job, step: jobs[job].lengths(step),
        bounds=lambda config: _bounds(config, jobs, begun_with),
    )
    bounds = _bounds(config.replace(mesh=ONE_DEVICE), jobs, begun_with)
    spec = _spec(config, model, jobs, bounds.max_tokens)
    choice = choose_mesh(config, spec, demand, this_machine())
    logger.info("%s", choice.reason)
    return config.replace(mesh=str(choice.sizes))


def _settle(
    config: RunConfig, model: ModelConfig, jobs: Sequence[JobData]
) -> RunConfig:
    """Replaces `mesh: auto`, and then `microbatch_tokens: auto` by a number.

    If the run has begun, this is the number that it began with. Otherwise it is what
    the trainer would choose on this machine before it compiles the training step.
    """
    begun_with = begun_capacity(config)
    config = _with_mesh(config, model, jobs, begun_with)
    if config.microbatch_tokens != "auto":
        return config
    if begun_with is not None:
        return config.replace(microbatch_tokens=begun_with)
    bounds = _bounds(config, jobs, begun_with)
    return settle(config, _spec(config, model, jobs, bounds.max_tokens), bounds)


def _bounds(
    config: RunConfig, jobs: Sequence[JobData], begun_with: int | None
) -> Bounds:
    """Bounds of the capacity; `begun_with` is what the run began with, if it has."""
    held_out = [job.held_out for job in jobs if job.held_out is not None]
    return Bounds.of(config, [j.data for j in jobs], held_out, begun_with=begun_with)


def _spec(
    config: RunConfig, model: ModelConfig, jobs: Sequence[JobData], max_tokens: int
) -> DecoderSpec:
    dtype = jnp.dtype(base_dtype(config.dtype))
    ranks = [_ranks(job.job, model) for job in jobs]
    data = [job.data for job in jobs]
    return prepare.spec_of(config, model, dtype, ranks, data, max_tokens)


def _ranks(job: LoraJob, model: ModelConfig) -> dict[str, int]:
    """Returns the rank of each module that a job adapts."""
    names = linear_names(model)
    by_path = {spec.path: spec.shape for spec in tensor_specs(model)}
    shapes = {name: by_path[f"{linear_path(name)}.kernel"] for name in names}
    if job.init_from is None:
        modules = resolve_targets(job, names)
        check_ranks(job, modules, shapes)
        return {name: module.rank for name, module in modules.items()}
    adapter = import_peft(job.init_from, shapes)
    return {name: weights.rank for name, weights in adapter.modules.items()}


# ---- windows -------------------------------------------------------------------------


def _lanes(config: RunConfig, jobs: Sequence[JobData]) -> Lanes:
    loads = [
        Load(num_batches=job.num_steps, batch_tokens=job.batch_tokens) for job in jobs
    ]
    num_slots = config.max_concurrent_jobs or len(jobs)
    capacity = config.limits.capacity
    return run_lanes(config, loads, capacity=capacity, num_slots=num_slots).lanes


def _cost(config: RunConfig, model: ModelConfig) -> CostModel:
    """Returns the time of a token in each stage, as a share of that in all stages."""
    num_stages, capacity = config.mesh_sizes.stage, config.limits.capacity
    if num_stages == 1:
        return fixed_shape_cost(capacity)
    dtype, speed = base_dtype(config.dtype), this_machine().speed
    borders = stage_borders(model, num_stages, speed, dtype=dtype, remat=config.remat)
    options = DecoderOptions(dtype=dtype, remat=config.remat, max_segment_tokens=1)
    spec = DecoderSpec(config=model, options=options)
    times = decoder_seconds(spec, speed).stages(borders)
    whole = sum(time.both for time in times)

    def share(seconds: float) -> AffineCost:
        return AffineCost(base=0.0, per_token=seconds / whole, per_square=0.0)

    stages = [
        StageCost(forward=share(time.forward), backward=share(time.backward))
        for time in times
    ]
    return CostModel(stages=tuple(stages), buckets=(capacity,))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """Samples by slot, and the job in each slot."""

    samples: tuple[Sample, ...]
    job_of_slot: dict[int, int]


def _positions(jobs: Sequence[JobData]) -> list[JobPosition]:
    """Returns the positions at the start of the run of the jobs that have steps."""
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


def _windows(
    config: RunConfig, jobs: Sequence[JobData], lanes: Lanes
) -> Iterator[_Window]:
    """Yields the windows of a run in which no job ends early."""
    num_slots = config.max_concurrent_jobs or len(jobs)
    if lanes.slots_per_replica is not None:
        num_slots = lanes.data * lanes.slots_per_replica
    positions = _positions(jobs)
    while positions:
        positions = assign_slots(
            positions, num_slots, preempts=config.preempt, lanes=lanes
        )
        running = {p.slot: p.job for p in positions if p.slot is not None}
        samples = window_samples(
            positions, config.window_steps, lambda job, step: jobs[job].lengths(step)
        )
        yield _Window(samples=samples, job_of_slot=running)
        positions = positions_after(positions, config.window_steps)


def _part(config: RunConfig, window: _Window, lanes: Lanes, cost: CostModel) -> Part:
    limits = config.limits
    schedule = pack_window(window.samples, limits, config.packer, lanes)
    greedy = pack_window(window.samples, limits, "greedy", lanes)
    bound = lower_bound(
        window.samples, limits, lanes.pipeline, cost, num_lanes=lanes.num_lanes
    )
    return Part(
        samples=_by_job(window.samples, window),
        schedule=_renamed(schedule, window),
        fewest=bound.microbatches,
        greedy=_renamed(greedy, window),
    )


def _by_job(samples: Sequence[Sample], window: _Window) -> tuple[Sample, ...]:
    """Replaces the slots of samples by the numbers of the jobs in them."""
    jobs = window.job_of_slot
    return tuple(dataclasses.replace(s, job=jobs[s.job]) for s in samples)


def _renamed(schedule: Schedule, window: _Window) -> Schedule:
    microbatches = tuple(_by_job(m, window) for m in schedule.microbatches)
    return dataclasses.replace(schedule, microbatches=microbatches)


def _join(
    schedules: Sequence[Schedule],
    parts: Sequence[Part],
    lanes: Lanes,
    cost: CostModel,
) -> Plan:
    """Concatenates the schedules of windows, and simulates them.

    No-ops between two windows let the pipeline drain.
    """
    drain: tuple[Microbatch, ...] = ((),) * lanes.num_lanes
    drain *= lanes.pipeline.distance - 1
    microbatches: list[Microbatch] = []
    for schedule in schedules:
        microbatches += (
            (*drain, *schedule.microbatches)
            if microbatches
            else (schedule.microbatches)
        )
    joined = Schedule(microbatches=tuple(microbatches), limits=schedules[0].limits)
    samples = list(itertools.chain.from_iterable(part.samples for part in parts))
    # Slots have become jobs, which may run on other replicas in other windows.
    lanes = dataclasses.replace(lanes, slots_per_replica=None)
    return evaluate(joined, samples, lanes, cost)

"""Plans a run without training: its microbatches, their fill, and simulated time.

This needs the tokenizer and the jobs' data, but no weights and no GPU.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Sequence

from jaxlora.config import RunConfig
from jaxlora.memory.footprint import num_bytes
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.spec import DecoderSpec
from jaxlora.run.folder import (
    as_begun,
    check_folder,
    check_writable,
    read_run_record,
    start_time,
)
from jaxlora.scheduler import (
    CostModel,
    Lanes,
    Microbatch,
    Plan,
    Sample,
    Schedule,
    lower_bound,
)
from jaxlora.scheduler.plan import evaluate
from jaxlora.scheduler.replicas import Load
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.trackers.table import check_installed
from jaxlora.train.check_inputs import check_inputs
from jaxlora.train.continue_job import check_continues
from jaxlora.train.describe_run import check_resumes, run_identity
from jaxlora.train.lanes import run_lanes, window_cost
from jaxlora.train.next_window import (
    assign_slots,
    pack_window,
    positions_after,
    window_samples,
)
from jaxlora.train.prepared_job import PreparedJob, data_reader, prepare_jobs
from jaxlora.train.settle_run import (
    first_positions,
    settle_elsewhere,
    settle_mesh,
    settle_run,
)


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
        base_bytes: Bytes of the frozen weights, on all devices of a replica together.
        base_format: How linears of the base are quantized; None: they are not.
        parts: Windows of the run, in the order in which they run.
        whole: The whole run, checked and simulated.
        greedy: The same samples under `packer: greedy`.
    """

    jobs: tuple[PreparedJob, ...]
    sizes: MeshSizes
    base_bytes: int
    base_format: BaseFormat | None
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


def plan_run(
    config: RunConfig, *, steps: int | None = None, other_machine: bool = False
) -> RunPlan:
    """Plans a run. Time is in units of what a device needs for one token.

    The plan has the same microbatches as the trainer, as long as no job ends early. A
    run that the trainer would refuse before its first step is refused, except for
    faults of weights that are not looked at, and for memory beyond the estimate. A
    pipeline drains between two windows.

    Args:
        config: The run. If its mesh is `auto`, it is chosen for this machine.
        steps: Number of optimizer steps of each job to plan; None: all.
        other_machine: Plan for another machine than this one, whose devices, kernels
            and memory then do not matter. `auto` for `microbatch_tokens` becomes what
            the jobs can fill, and for `remat` it becomes `none`.

    Raises:
        JaxloraError: The run cannot be trained.
    """
    output_dir = pathlib.Path(config.output_dir)

    def check_trackers() -> None:
        if not other_machine:
            check_installed(config.report_to)

    def check_output_dir() -> None:
        check_writable(output_dir)
        check_folder(output_dir, resume=read_run_record(output_dir) is not None)

    config = as_begun(config)
    inputs = check_inputs(
        config,
        None,
        start_time(output_dir),
        report_to=check_trackers,
        output_dir=check_output_dir,
    )
    model, reader = inputs.model, data_reader(config, inputs.tokenizer)
    jobs = prepare_jobs(config.jobs, model.config, reader)
    if other_machine:
        config = settle_elsewhere(config, model, jobs)
    else:
        config = settle_mesh(config, model, jobs)
        settled = settle_run(config, model, jobs)
        config = settled.config
        _check_saved_states(config, settled.spec, jobs)
    if steps is not None:
        jobs = [job.first_steps(steps) for job in jobs]
    lanes = _lanes(config, jobs)
    cost = window_cost(config, model.config)
    parts = tuple(_part(config, w, lanes, cost) for w in _windows(config, jobs, lanes))
    return RunPlan(
        jobs=tuple(jobs),
        sizes=config.mesh_sizes,
        base_bytes=num_bytes(model.spec.base_shapes()),
        base_format=model.base_format,
        parts=parts,
        whole=_join([p.schedule for p in parts], parts, lanes, cost),
        greedy=_join([p.greedy for p in parts], parts, lanes, cost),
    )


def _check_saved_states(
    config: RunConfig, spec: DecoderSpec, jobs: Sequence[PreparedJob]
) -> None:
    """Checks the checkpoints that the run, or a job of it, would continue from."""
    identity = run_identity(config, "", spec, jobs)
    folder = pathlib.Path(config.output_dir)
    if read_run_record(folder) is not None:
        check_resumes(folder, identity, jobs)
        return
    for job in jobs:
        if job.job.continue_from is not None:
            check_continues(job.job, run_identity(config, "", spec, [job]))


# ---- windows -------------------------------------------------------------------------


def _lanes(config: RunConfig, jobs: Sequence[PreparedJob]) -> Lanes:
    loads = [
        Load(num_batches=job.num_steps, batch_tokens=job.batch_tokens) for job in jobs
    ]
    num_slots = config.max_concurrent_jobs or len(jobs)
    capacity = config.limits.capacity
    return run_lanes(config, loads, capacity=capacity, num_slots=num_slots).lanes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """Samples by slot, and the job in each slot."""

    samples: tuple[Sample, ...]
    job_of_slot: dict[int, int]


def _windows(
    config: RunConfig, jobs: Sequence[PreparedJob], lanes: Lanes
) -> Iterator[_Window]:
    """Yields the windows of a run in which no job ends early."""
    num_slots = config.max_concurrent_jobs or len(jobs)
    if lanes.slots_per_replica is not None:
        num_slots = lanes.data * lanes.slots_per_replica
    positions = first_positions(jobs)
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

"""Plans a run without training: whether it fits, its microbatches, and its time.

This needs the tokenizer and the jobs' data, but no weights and no GPU.
"""

import dataclasses
import datetime
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence

from jaxlora.common.note import log_notes
from jaxlora.config import RunConfig
from jaxlora.costs.gpus import GpuMachine
from jaxlora.device_check import check_device
from jaxlora.memory.bounds import Bounds
from jaxlora.memory.gpu_share import GATHERING_SHARE, SHARE
from jaxlora.memory.need import MemoryNeed
from jaxlora.pallas_kernels.device import planned_for
from jaxlora.plan.cost import PlannedTime, check_fits, memory_need, run_seconds
from jaxlora.run.folder import (
    as_begun,
    check_folder,
    check_writable,
    read_run_record,
    start_time,
)
from jaxlora.scheduler import (
    Microbatch,
    Plan,
    Sample,
    Schedule,
    lower_bound,
)
from jaxlora.scheduler.plan import evaluate
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.trackers.table import check_installed
from jaxlora.train.plan.auto_mesh.machine import this_machine
from jaxlora.train.plan.check_inputs import check_inputs
from jaxlora.train.plan.next_window import (
    assign_slots,
    pack_window,
    positions_after,
    window_samples,
)
from jaxlora.train.plan.prepared_job import PreparedJob, data_reader, prepare_jobs
from jaxlora.train.plan.run_plan import RunPlan, first_positions, resolve
from jaxlora.train.saved.continue_job import check_continues
from jaxlora.train.saved.describe_run import check_resumes, run_identity


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
class RunForecast:
    """The predicted course of a run in which no job ends early.

    Attributes:
        plan: What is decided about the run.
        machine: GPUs that the plan is for; None: those of this machine.
        jobs: Jobs of the run.
        memory: What it needs on each device, by estimate.
        time: How long it takes, predicted; None: the rates of the device are not known.
        parts: Windows of the run, in the order in which they run.
        whole: The whole run, checked and simulated.
        greedy: The same samples under `packer: greedy`.
    """

    plan: RunPlan
    machine: GpuMachine | None
    jobs: tuple[PreparedJob, ...]
    memory: MemoryNeed
    time: PlannedTime | None
    parts: tuple[Part, ...]
    whole: Plan
    greedy: Plan

    @property
    def config(self) -> RunConfig:
        """The run; none of `mesh`, `microbatch_tokens` and `remat` is `auto`."""
        return self.plan.config

    @property
    def sizes(self) -> MeshSizes:
        """Sizes of the mesh."""
        return self.plan.stages.sizes

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
    config: RunConfig,
    *,
    steps: int | None = None,
    machine: GpuMachine | None = None,
) -> RunForecast:
    """Plans a run. Simulated time is in units of what a device needs for one token.

    The plan has the same microbatches as the trainer, as long as no job ends early. A
    run that the trainer would refuse before its first step is refused, except for
    faults of weights that are not looked at, and for memory beyond the estimate. A
    pipeline drains between two windows.

    Args:
        config: The run. If its mesh is `auto`, it is chosen for the machine.
        steps: Number of optimizer steps of each job to plan; None: all.
        machine: GPUs to plan for, which need not be here (`parse_machine` reads their
            name); None: the devices of this machine. If the run has no mesh of its own,
            it is then chosen as by `auto`. Trackers and `output_dir` are those of the
            other machine and are not looked at.

    Raises:
        DoesNotFitError: The run does not fit into the memory of the GPUs.
        JaxloraError: The run cannot be trained.
    """
    if machine is None:
        return _plan_here(config, steps)
    if machine.count > 1 and "mesh" not in config.model_fields_set:
        config = config.replace(mesh="auto")
    share = GATHERING_SHARE if config.may_gather else SHARE
    with planned_for(machine.planned(share)):
        plan, jobs = _resolve(config, datetime.datetime.now().isoformat())
        check_fits(plan)
        return _forecast(plan, jobs, steps, machine)


def _plan_here(config: RunConfig, steps: int | None) -> RunForecast:
    check_device()
    output_dir = pathlib.Path(config.output_dir)

    def check_output_dir() -> None:
        check_writable(output_dir)
        check_folder(output_dir, resume=read_run_record(output_dir) is not None)

    plan, jobs = _resolve(
        as_begun(config),
        start_time(output_dir),
        report_to=lambda: check_installed(config.report_to),
        output_dir=check_output_dir,
    )
    _check_saved_states(plan, jobs)
    return _forecast(plan, jobs, steps, None)


def _resolve(
    config: RunConfig, started: str, **checks: Callable[[], object]
) -> tuple[RunPlan, Sequence[PreparedJob]]:
    """Checks what a run names, reads its data and plans it; logs the reasons.

    Args:
        config: The run.
        started: Time at which it began, in ISO format.
        **checks: Further checks; see `check_inputs`.
    """
    inputs = check_inputs(config, None, started, **checks)
    reader = data_reader(config, inputs.tokenizer)
    jobs = prepare_jobs(config.jobs, inputs.modules, inputs.model.config, reader)
    log_notes(note for job in jobs for note in job.notes)
    plan = resolve(config, inputs.model, jobs, this_machine())
    log_notes(plan.notes)
    return plan, jobs


def _forecast(
    plan: RunPlan,
    jobs: Sequence[PreparedJob],
    steps: int | None,
    machine: GpuMachine | None,
) -> RunForecast:
    """Packs the windows of a run, and predicts what it needs."""
    if steps is not None:
        jobs = [job.first_steps(steps) for job in jobs]
    parts = tuple(_part(plan, window) for window in _windows(plan, jobs))
    return RunForecast(
        plan=plan,
        machine=machine,
        jobs=tuple(jobs),
        memory=memory_need(plan),
        time=_time(plan, jobs, parts),
        parts=parts,
        whole=_join([p.schedule for p in parts], parts, plan),
        greedy=_join([p.greedy for p in parts], parts, plan),
    )


def _time(
    plan: RunPlan, jobs: Sequence[PreparedJob], parts: Sequence[Part]
) -> PlannedTime | None:
    together = run_seconds(plan, [part.schedule for part in parts])
    if together is None:
        return None
    apart = [together]
    if len(jobs) > 1:
        apart = [_seconds_alone(plan, job) for job in jobs]
    return PlannedTime(together=together, apart=sum(apart))


def _seconds_alone(plan: RunPlan, job: PreparedJob) -> float:
    """Predicts the time of one job that has the mesh to itself."""
    config = plan.config.replace(jobs=[job.settings], max_concurrent_jobs=1)
    held_out = [] if job.eval_data is None else [job.eval_data]
    if plan.bounds.fixed is None:
        auto = config.replace(microbatch_tokens="auto")
        largest = Bounds.of(auto, [job.train_data], held_out).largest
        tokens = min(largest, config.limits.capacity)
        config = config.replace(microbatch_tokens=tokens)
    alone = plan.alone(config, job)
    schedules = [
        pack_window(w.samples, config.limits, config.packer, alone.lanes)
        for w in _windows(alone, [job])
    ]
    seconds = run_seconds(alone, schedules)
    assert seconds is not None
    return seconds


def _check_saved_states(plan: RunPlan, jobs: Sequence[PreparedJob]) -> None:
    """Checks the checkpoints that the run, or a job of it, would continue from."""
    folder = pathlib.Path(plan.config.output_dir)
    if read_run_record(folder) is not None:
        check_resumes(folder, run_identity(plan, "", jobs), jobs)
        return
    for job in jobs:
        if job.settings.continue_from is not None:
            own = run_identity(plan, "", [job])
            check_continues(job.settings, job.num_steps, own)


# ---- windows -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """Samples by slot, and the job in each slot."""

    samples: tuple[Sample, ...]
    job_of_slot: dict[int, int]


def _windows(plan: RunPlan, jobs: Sequence[PreparedJob]) -> Iterator[_Window]:
    """Yields the windows of a run in which no job ends early."""
    config, positions = plan.config, first_positions(jobs)
    while positions:
        positions = assign_slots(
            positions, plan.num_slots, preempts=config.preempt, lanes=plan.lanes
        )
        running = {p.slot: p.job for p in positions if p.slot is not None}
        samples = window_samples(
            positions, config.window_steps, lambda job, step: jobs[job].lengths(step)
        )
        yield _Window(samples=samples, job_of_slot=running)
        positions = positions_after(positions, config.window_steps)


def _part(plan: RunPlan, window: _Window) -> Part:
    limits, lanes = plan.config.limits, plan.lanes
    schedule = pack_window(window.samples, limits, plan.config.packer, lanes)
    greedy = pack_window(window.samples, limits, "greedy", lanes)
    bound = lower_bound(
        window.samples, limits, lanes.pipeline, plan.cost, num_lanes=lanes.num_lanes
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
    return tuple(dataclasses.replace(s, owner=jobs[s.owner]) for s in samples)


def _renamed(schedule: Schedule, window: _Window) -> Schedule:
    microbatches = tuple(_by_job(m, window) for m in schedule.microbatches)
    return dataclasses.replace(schedule, microbatches=microbatches)


def _join(schedules: Sequence[Schedule], parts: Sequence[Part], plan: RunPlan) -> Plan:
    """Concatenates the schedules of windows, and simulates them.

    No-ops between two windows let the pipeline drain.
    """
    lanes = plan.lanes
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
    return evaluate(joined, samples, lanes, plan.cost)

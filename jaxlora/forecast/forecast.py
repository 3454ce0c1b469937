"""Plans a run without training: whether it fits, its microbatches, and its time.

This needs the tokenizer and the jobs' data, but no weights and no GPU.
"""

import dataclasses
import pathlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from jaxlora.common.note import log_notes
from jaxlora.config import RunConfig
from jaxlora.costs.gpus import GpuMachine
from jaxlora.costs.stages import decoder_seconds, total
from jaxlora.device_check import check_device
from jaxlora.errors import ConfigError
from jaxlora.forecast.sweep_groups import PlannedGroups, plan_groups
from jaxlora.pallas_kernels.device import planned_for
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepare_run import prepare_run
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.memory.gpu_share import GATHERING_SHARE, SHARE
from jaxlora.plan.memory.need import MemoryNeed
from jaxlora.plan.memory.refusal import refusal
from jaxlora.plan.mesh.candidates import first_positions
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.plan.run_plan import RunPlan
from jaxlora.plan.stages import estimated_footprint
from jaxlora.plan.stream_plan import StreamPlan
from jaxlora.run.folder import (
    SWEEP_LEDGER,
    check_folder,
    check_writable,
)
from jaxlora.scheduler import Plan, Sample, Schedule
from jaxlora.scheduler.lanes import Tick
from jaxlora.scheduler.packers import evaluate
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.trackers.table import check_installed
from jaxlora.train.saved.continue_job import continued_step
from jaxlora.train.saved.resume import as_begun

# Each is placed, which takes about 0.1 ms.
_MOST_SAMPLES = 2_000_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTime:
    """Predicted time of training, without start-up, evaluations and checkpoints.

    Attributes:
        together: Seconds of the run.
        apart: Seconds of its jobs one after the other, each alone on the same mesh.
    """

    together: float
    apart: float

    @property
    def hours(self) -> float:
        """Hours of the run."""
        return self.together / 3600


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunForecast:
    """The predicted course of a run in which no job ends early.

    Attributes:
        plan: What is decided about the run.
        machine: GPUs that the plan is for; None: those of this machine.
        jobs: Jobs of the run.
        memory: What it needs on each device, by estimate.
        time: How long it takes, predicted; None: the rates of the device are not known.
        samples: All samples; they name their job by its number in the run file.
        num_microbatches: Number of microbatches with samples.
        fill: Part of the rows of its microbatches that holds samples.
        whole: The whole run, checked and simulated; None: it has replicas of different
            sizes.
        groups: The plan of a sweep on all GPUs of the machine; None: the run has no
            sweep, or the rates of the device are not known.
    """

    plan: RunPlan
    machine: GpuMachine | None
    jobs: tuple[PreparedJob, ...]
    memory: MemoryNeed
    time: PlannedTime | None
    samples: tuple[Sample, ...]
    num_microbatches: int
    fill: float
    whole: Plan | None = None
    groups: PlannedGroups | None = None

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
        return sum(s.num_tokens for s in self.samples)


def plan_run(
    config: RunConfig,
    *,
    steps: int | None = None,
    machine: GpuMachine | None = None,
) -> RunForecast:
    """Plans a run. Simulated time is in units of what a device needs for one token.

    The plan has the same microbatches as the trainer, as long as no job ends early. A
    run that the trainer would refuse before its first step is refused, except for
    faults of weights that are not looked at, and for memory beyond the estimate.

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
    log_notes(config.notes)
    if machine is None:
        return _plan_here(config, steps)
    is_given = config.replicas is not None or "mesh" in config.model_fields_set
    if machine.count > 1 and not is_given:
        config = config.replace(mesh="auto")
    share = GATHERING_SHARE if config.may_gather else SHARE
    with planned_for(machine.planned(share)):
        plan, jobs, _ = prepare_run(config, continued_step)
        return _forecast(plan, jobs, steps, machine)


def _plan_here(config: RunConfig, steps: int | None) -> RunForecast:
    check_device()
    output_dir = pathlib.Path(config.output_dir)

    def check_output_dir() -> None:
        check_writable(output_dir)
        has_groups = config.sweep is not None and config.sweep.has_groups
        if not (has_groups and (output_dir / SWEEP_LEDGER).exists()):
            check_folder(output_dir, resume=begun.found.record is not None)

    def check_saved(model: PlannedModel, jobs: Sequence[PreparedJob]) -> None:
        begun.found.check_prepared(model, jobs, drop_state=False)

    begun = as_begun(config)
    log_notes(begun.notes)
    plan, jobs, _ = prepare_run(
        begun.config,
        continued_step,
        started=begun.started,
        ended=begun.ended,
        chosen=begun.chosen,
        on_read=check_saved,
        report_to=lambda: check_installed(config.report_to),
        output_dir=check_output_dir,
    )
    return _forecast(plan, jobs, steps, None)


def _forecast(
    plan: RunPlan,
    jobs: Sequence[PreparedJob],
    steps: int | None,
    machine: GpuMachine | None,
) -> RunForecast:
    """Plans the microbatches of a run, and predicts what it needs.

    Raises:
        DoesNotFitError: It is estimated not to fit into the GPUs of another machine.
    """
    memory = _memory_need(plan, must_fit=machine is not None)
    if steps is not None:
        jobs = [job.first_steps(steps) for job in jobs]
    _check_samples(jobs)
    schedule, num_rows = foretell(plan, jobs)
    samples = tuple(s for m in schedule.microbatches for s in m)
    num_tokens = sum(s.num_tokens for s in samples)
    whole = None
    if not plan.lanes.replicas:
        whole = evaluate(schedule, samples, plan.lanes, plan.cost)
    return RunForecast(
        plan=plan,
        machine=machine,
        jobs=tuple(jobs),
        memory=memory,
        time=_time(plan, jobs, schedule),
        samples=samples,
        num_microbatches=sum(map(bool, schedule.microbatches)),
        fill=num_tokens / max(1, num_rows),
        whole=whole,
        groups=_groups(plan, jobs),
    )


def _check_samples(jobs: Sequence[PreparedJob]) -> None:
    """Checks that there are few enough samples to plan each of them."""
    each = [(job.num_steps, job.order) for job in jobs]
    count = sum(n * min(o.batch_size, o.num_samples) for n, o in each)
    if count > _MOST_SAMPLES:
        raise ConfigError(
            f"the run trains on {count:,} samples, and a plan has at most "
            f"{_MOST_SAMPLES:,}, as it places each of them. Plan the first steps of "
            "each job, such as --steps 1000."
        )


def _groups(plan: RunPlan, jobs: Sequence[PreparedJob]) -> PlannedGroups | None:
    sweep = plan.config.sweep
    return None if sweep is None else plan_groups(plan, jobs, this_machine())


def plan_run_groups(config: RunConfig) -> PlannedGroups | None:
    """Plans the sweep of a run on the GPUs of this machine, without its microbatches.

    Returns:
        The plan; None: the rates of the device are not known.

    Raises:
        JaxloraError: The run cannot be trained.
    """
    plan, jobs, _ = prepare_run(config, continued_step)
    return _groups(plan, jobs)


def _time(
    plan: RunPlan, jobs: Sequence[PreparedJob], schedule: Schedule
) -> PlannedTime | None:
    together = plan.seconds(schedule, num_changes=2 * len(jobs))
    if together is None:
        return None
    together *= _with_reference(plan, jobs, schedule)
    apart = [together]
    if len(jobs) > 1:
        apart = [_seconds_alone(plan, job) for job in jobs]
    return PlannedTime(together=together, apart=sum(apart))


def _seconds_alone(plan: RunPlan, job: PreparedJob) -> float:
    """Predicts the time of one job that has the mesh to itself."""
    config = plan.config.replace(jobs=[job.settings], max_concurrent_jobs=1, sweep=None)
    held_out = [] if job.eval_data is None else [job.eval_data]
    if plan.bounds.fixed is None:
        auto = config.replace(microbatch_tokens="auto")
        largest = Bounds.of(auto, auto.jobs, [job.train_data], held_out).largest
        tokens = min(largest, config.limits.capacity)
        config = config.replace(microbatch_tokens=tokens)
    alone = plan.alone(config, job)
    schedule, _ = foretell(alone, [job])
    seconds = alone.seconds(schedule, num_changes=2)
    assert seconds is not None
    return seconds * _with_reference(alone, [job], schedule)


def _with_reference(
    plan: RunPlan, jobs: Sequence[PreparedJob], schedule: Schedule
) -> float:
    """Returns the time of a schedule with references in the step, as a factor.

    They take one more forward pass of the microbatches in which they are.
    """
    refer = {number for number, job in enumerate(jobs) if job.runs_reference}
    run = [m for m in schedule.microbatches if m]
    num = sum(any(sample.owner in refer for sample in m) for m in run)
    if not num:
        return 1.0
    whole = total(decoder_seconds(plan.spec, plan.rates.speed))
    return 1 + num / len(run) * whole.forward / whole.both


def _memory_need(plan: RunPlan, *, must_fit: bool) -> MemoryNeed:
    """Estimates the memory of a run.

    Raises:
        DoesNotFitError: `must_fit` is true, and it does not.
    """
    tokens = plan.config.limits.capacity
    found = estimated_footprint(plan.stages, plan.config.block_tokens, tokens)
    available = this_machine().memory_of(plan.stages.sizes.num_devices)
    need = MemoryNeed.of(plan.stages, found, tokens, available)
    if must_fit and not need.fits:
        assert available is not None
        raise refusal(plan, found, available)
    return need


# ---- microbatches --------------------------------------------------------------------


def foretell(plan: RunPlan, jobs: Sequence[PreparedJob]) -> tuple[Schedule, int]:
    """Returns the microbatches of a run, which name their jobs by number.

    Args:
        plan: The plan of the run.
        jobs: Its jobs.

    Returns:
        The microbatches, and the rows of those that are not empty, padding included.
    """
    with StreamPlan(plan.rules, lambda job, step: jobs[job].lengths(step)) as stream:
        course = list(_Course(plan, jobs, stream).ticks())
    ticks = [tick for tick, _ in course]
    while not any(ticks[-1]):
        ticks.pop()
    if plan.lanes.pipeline.distance == 1:  # a no-op takes no time
        ticks = [tick for tick in ticks if any(tick)]
    microbatches = tuple(microbatch for tick in ticks for microbatch in tick)
    schedule = Schedule(microbatches=microbatches, limits=plan.config.limits)
    return schedule, sum(_num_rows(plan, tick, rows) for tick, rows in course)


def _num_rows(plan: RunPlan, tick: Tick, rows: int) -> int:
    """Returns the rows of the microbatches with samples of a tick of this shape."""
    each = [lane.capacity for lane in plan.lanes.unlike] or [rows] * len(tick)
    return sum(n for n, microbatch in zip(each, tick, strict=True) if microbatch)


class _Course:
    """The course of a run: which job has which slot, and when."""

    def __init__(self, plan: RunPlan, jobs: Sequence[PreparedJob], stream: StreamPlan):
        self._plan, self._jobs, self._stream = plan, jobs, stream
        self._waiting = first_positions(jobs)
        self._in_slot: dict[int, int] = {}  # job by slot
        self._done: Counter[tuple[int, int]] = Counter()  # samples, by slot and batch
        # Ticks that are taken after a tick before the trainer knows of its steps: W
        # until they are reported, and W that are in flight and prepared by then.
        pipeline = plan.lanes.pipeline
        self._lag = 2 * (pipeline.in_flight or pipeline.num_stages)

    def ticks(self) -> Iterator[tuple[Tick, int]]:
        """Yields the ticks, whose samples name their job by number, and their rows."""
        stepping: deque[tuple[int, int]] = deque()  # the tick of a report, and a slot
        self._fill_slots()
        for number, taken in enumerate(iter(self._stream.take, None)):
            yield self._renamed(taken.tick), taken.rows
            stepping += [(number + self._lag, s) for s in self._completed(taken.tick)]
            ended = []
            while stepping and stepping[0][0] <= number:
                slot = stepping.popleft()[1]
                self._stream.note_step(slot)
                if self._stream.is_done(slot):
                    ended.append(slot)
            for slot in ended:
                del self._in_slot[slot]
                self._stream.drop(slot)
            if ended:
                self._fill_slots()

    def _completed(self, tick: Tick) -> list[int]:
        """Returns the slots whose batch is complete with a tick."""
        touched = Counter((s.owner, s.batch) for m in tick for s in m)
        self._done.update(touched)
        complete = []
        for slot, batch in sorted(touched):
            job = self._jobs[self._in_slot[slot]]
            if self._done[slot, batch] == len(job.lengths(batch)):
                del self._done[slot, batch]
                complete.append(slot)
        return complete

    def _fill_slots(self) -> None:
        """Starts jobs in free slots; none is paused, as none comes later."""
        free = [s for s in range(self._plan.num_slots) if s not in self._in_slot]
        started = list(zip(self._waiting, free, strict=False))
        del self._waiting[: len(started)]
        for position, slot in sorted(started, key=lambda one: one[0].job):
            self._in_slot[slot] = position.job
            self._stream.start(dataclasses.replace(position, owner=slot))

    def _renamed(self, tick: Tick) -> Tick:
        """Replaces the slots of samples by the numbers of the jobs in them."""
        jobs = self._in_slot
        return tuple(
            tuple(dataclasses.replace(s, owner=jobs[s.owner]) for s in microbatch)
            for microbatch in tick
        )

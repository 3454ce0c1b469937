"""A run: what was decided about it, its base, its slots and jobs, and its files."""

import contextlib
import dataclasses
import functools
import logging
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlora.adapters.parked_slot import ParkedSlot, ReadSlot
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.common.note import log_notes
from jaxlora.distributed import processes
from jaxlora.hf.load import FrozenModel
from jaxlora.models.forward import Base
from jaxlora.models.structure import linear_names
from jaxlora.plan.job.prepared_job import DataReader, PreparedJob
from jaxlora.plan.memory.capacity import fit
from jaxlora.plan.memory.device_memory import measured_peak
from jaxlora.plan.memory.footprint import StagePrograms
from jaxlora.plan.run_plan import RunPlan
from jaxlora.run import events
from jaxlora.run.callback import Listeners
from jaxlora.run.folder import ADAPTERS, check_folder
from jaxlora.run.identity import RunIdentity
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.lock import RunLock
from jaxlora.run.saved_run import RunRecord, SavedRun, SavedStream
from jaxlora.train.control import Control
from jaxlora.train.execute.draw_ahead import DrawAhead
from jaxlora.train.execute.layout import Layout
from jaxlora.train.execute.run_programs import RunPrograms
from jaxlora.train.execute.texts import AnswerMeter, Sampler
from jaxlora.train.job_state import JobState
from jaxlora.train.live_jobs import LiveJobs
from jaxlora.train.report.stopwatch import Stopwatch
from jaxlora.train.report.summary import (
    NOT_KNOWN,
    Comparison,
    RunResult,
    TrainingTime,
    job_result,
)
from jaxlora.train.saved.continue_job import (
    continue_job,
    copy_best_export,
    go_on_with_reference,
    restore_jobs,
    write_references,
)
from jaxlora.train.saved.read_checkpoint import ReadCheckpoint
from jaxlora.train.saved.resume import FoundRun, resolved_config, run_identity
from jaxlora.train.saved.run_store import RunStore

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, eq=False)
class Run:
    """A run whose base and data are loaded: where it is, and its files.

    `open_run` makes it. Its programs may still be compiled then, and its slots are
    empty. Each call of `Trainer.train` then takes the lock of its folder (`locked`),
    begins (`begin`) and trains.

    Attributes:
        plan: The plan of the run, with the jobs that joined it earlier.
        model: The frozen base.
        layout: The decoder on its devices.
        further_bases: The frozen base on each further replica.
        slots: The slots, with the adapters of running jobs.
        num_compiled: Programs that this process has compiled for the layout before.
        chooses_replicas: Whether the user left its replicas to `auto`.
        reader: Reads the data of jobs.
        found: What the folder of the run held when it was opened.
        started: Time at which the run began, in ISO format.
        sampler: Generates texts at evaluations; None if `samples` asks for none.
        meter: Measures answers at evaluations; None without such a metric of a sweep.
        control: Decides about the jobs, and adds further ones.
        live: The jobs, and the requests to stop and to pause them.
        round: Rounds done; see `Loop`.
        has_events: Whether jobs have had events in the round that follows.
        listeners: Callbacks that the events are sent to.
        training_time: Time of the windows so far, predicted and measured.
        watch: Divides the time among what is done.
        lock: Lock of the run's folder; only `locked` sets it.
        store: The files; only `begin` sets it.
        ahead: The first weights of the jobs that start next; only `begin` sets it.
    """

    plan: RunPlan
    model: FrozenModel
    layout: Layout
    further_bases: Sequence[Base]
    slots: StagedSlots
    num_compiled: int
    chooses_replicas: bool
    reader: DataReader
    found: FoundRun
    started: str
    sampler: Sampler | None
    meter: AnswerMeter | None
    control: Control
    live: LiveJobs = dataclasses.field(init=False)
    round: int = 0
    has_events: bool = False
    listeners: Listeners = dataclasses.field(init=False)
    training_time: TrainingTime = dataclasses.field(init=False)
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    lock: RunLock = dataclasses.field(init=False)
    store: RunStore = dataclasses.field(init=False)
    ahead: DrawAhead = dataclasses.field(init=False)
    _has_begun: bool = False
    _resolved: dict[str, Any] = dataclasses.field(init=False)  # settings of the plan
    # Jobs whose references were written.
    _referenced: set[str] = dataclasses.field(default_factory=set)
    _checked: float = 0.0  # when the folder was looked at last

    @property
    def folder(self) -> pathlib.Path:
        """Folder of the run."""
        return pathlib.Path(self.plan.config.output_dir)

    @property
    def jobs(self) -> list[JobState]:
        """The jobs, in the order in which they were given or have joined."""
        return self.live.jobs

    def identity(self, jobs: Sequence[JobState]) -> RunIdentity:
        """Returns what is compared when a run of these jobs is resumed."""
        prepared = [job.prepared for job in jobs]
        return run_identity(self.plan.model, prepared, self.model.fingerprint)

    def _record(self, **live: Any) -> RunRecord:
        """Returns the record of the run.

        Args:
            **live: The fields that do not follow from what was decided about the run.
        """
        return RunRecord(
            started=self.started,
            identity=self.identity(self.jobs),
            config=self._resolved,
            base_model=self.model.source,
            base_revision=self.model.revision,
            linear_names=linear_names(self.model.config),
            model_type=self.model.config.model_type,
            ended=list(self.plan.ended),
            **live,
        )

    # ---- programs ------------------------------------------------------------------

    def _start_programs(self, plan: RunPlan) -> RunPrograms:
        """Starts to compile all programs of the run, with the settings of a plan."""
        layout = self.layout.with_remat(plan.spec.options.remat)
        evaluates = any(is_evaluated(job.prepared) for job in self.jobs)
        return RunPrograms.start(layout, plan.config.limits, evaluates=evaluates)

    def compile(self, plan: RunPlan) -> tuple[StagePrograms, ...]:
        """Compiles the passes of all stages; the other programs beside them.

        Args:
            plan: The run's plan, or one with another capacity or `remat`.
        """
        return self._start_programs(plan).compiled_passes()

    def _fit(self) -> None:
        """Makes the plan fit when compiled, logs what changed, and waits for programs.

        Raises:
            ConfigError: The device's memory cannot hold the run.
        """
        plan = fit(self.plan, self.compile)
        programs = self._start_programs(plan)
        log_notes([*plan.notes, *plan.replica_notes(programs.compiled_further())])
        programs.finish()
        self.plan, self.layout = plan, self.layout.with_remat(plan.spec.options.remat)
        self._resolved = resolved_config(plan)

    # ---- one call of `Trainer.train` -----------------------------------------------

    @contextlib.contextmanager
    def locked(self, *, resume: bool) -> Iterator[None]:
        """Takes the lock of the folder, so that no other process writes to it.

        Raises:
            CheckpointError: Another process has it, or it holds another run or nothing
                to resume.
        """
        lock = RunLock(self.folder)
        with contextlib.ExitStack() as held:

            def take() -> None:
                held.enter_context(lock)
                check_folder(self.folder, resume=resume)

            processes.from_first(take)
            self.lock = lock
            yield

    def begin(self, *, resume: bool, drop_state: bool) -> SavedStream | None:
        """Restores the jobs, and makes the plan fit; no file is changed yet.

        The caller closes the `store`.

        Args:
            resume: See `Trainer.train`.
            drop_state: See `Trainer.train`.

        Returns:
            The microbatches that follow the checkpoint, if there is one.

        Raises:
            CheckpointError: The run cannot be resumed, see `FoundRun.check`, or its
                checkpoint is damaged.
            ConfigError: The device's memory cannot hold the run.
        """
        if self._has_begun:  # in an earlier call, whose requests to stop are kept
            self.slots = self.layout.empty_slots()
            for job in self.jobs:
                job.progress, job.parked = JobProgress(), None
        self._has_begun = True
        self.listeners, self.training_time = Listeners([]), TrainingTime()
        self.watch = Stopwatch()
        self.has_events, self._referenced = False, set()
        self.live.take()
        self._resolved = resolved_config(self.plan)
        # A resume is refused before anything is compiled.
        found = self._check_may_resume(drop_state=drop_state) if resume else None
        keep = self.plan.config.keep_checkpoints
        self.store = RunStore(self.folder, self.lock, found, keep=keep)
        with contextlib.ExitStack() as opened:
            opened.callback(self.store.close)
            checkpoint = self._restore()
            self.ahead = DrawAhead(self.slots)
            self.ahead.begin(self._first())
            with self.watch.on("waiting for programs"):
                self._fit()
            opened.pop_all()
        self.round = 0 if checkpoint is None else checkpoint.number
        return None if checkpoint is None else checkpoint.run.stream

    def _first(self) -> list[JobState]:
        """Returns the jobs that may start from their first weights, the next one first.

        Jobs that wait for a sweep are among them, as its decisions come later.
        """
        found = [
            job
            for job in self.jobs
            if not (job.has_begun or job.progress.is_over or job.awaits)
            and self.live.pause_reason(job.name) is None
        ]
        return sorted(found, key=lambda job: -job.settings.priority)

    def _check_may_resume(self, *, drop_state: bool) -> FoundRun:
        """Returns what the locked folder holds, from which the run goes on."""
        identity, found = self.identity(self.jobs), self.found
        prepared = [job.prepared for job in self.jobs]

        def check() -> None:
            nonlocal found
            found = found.current()
            found.check(identity, prepared, drop_state=drop_state)

        processes.from_first(check)
        return found

    def _restore(self) -> ReadCheckpoint | None:
        """Restores jobs and requests; returns the checkpoint that has them, if any."""
        store, control = self.store, self.control
        found = store.restore(self._record())
        # Jobs that were suggested after the checkpoint are suggested again. An earlier
        # call of `train` may have suggested some that are not recorded.
        record, known = store.record, {} if found is None else found.run.progress
        names, requests = processes.from_first(
            lambda: ([], {}) if record is None else (record.suggested, record.requests)
        )
        for name in {*names, *control.suggested()} - known.keys():
            if name in self.live.added:
                self.live.drop(name)
        if found is None:
            control.restore(None, {})
        else:
            control.restore(found.run.sweep, found.run.suggested)
            restore_jobs(self.jobs, found, self.slots, self.plan.num_slots)
            for job in [job for job in self.jobs if job.has_begun]:
                go_on_with_reference(self.folder, job, self.model.fingerprint)
            logger.info("resumed after round %d", found.number)
        self.live.restore_requests(requests)
        self.continue_jobs(self.jobs)
        return found

    def continue_jobs(self, jobs: Sequence[JobState]) -> None:
        """Gives jobs that come from another run, and are new here, their states.

        Raises:
            CheckpointError: See `continue_job`.
        """
        for job in jobs:
            if job.settings.continue_from and job.progress.status == "waiting":
                continue_job(job, self.identity([job]))
                folder = pathlib.Path(job.settings.continue_from)
                go_on_with_reference(folder, job, self.model.fingerprint)

    # ---- events and files ----------------------------------------------------------

    def send(self, event: events.Event) -> None:
        """Sends an event to the callbacks."""
        if isinstance(event, events.WindowEvent):
            self.training_time.add(event)
        # Callbacks would make a removed folder again. Steps may follow each other in a
        # millisecond, so not every one of them asks the file system.
        now = time.monotonic()
        if not isinstance(event, events.StepEvent) or now > self._checked + 0.1:
            self.lock.check_folder()
            self._checked = now
        self.listeners.send(event)

    def send_of(self, job: JobState, kind: type[events.JobEvent], **values) -> None:
        """Sends an event of a job at the step that it has reached, in this round."""
        self.has_events = True
        event = kind(
            round=self.round + 1,
            job=job.name,
            progress=job.progress,
            num_steps=job.num_steps,
            **values,
        )
        self.send(event)

    def send_written(self, *, waits: bool = False) -> None:
        """Sends events for the checkpoints and adapters that are on the disk."""
        with self.watch.on("waiting for files"):
            written = self.store.written(waits=waits)
        for event in written:
            self.send(event)

    def take_added(self) -> None:
        """Takes the jobs that have joined into the run."""
        for job in self.live.take():
            self.send(events.JobAddEvent(round=self.round, info=job.info()))

    def record(self) -> None:
        """Takes the jobs that have joined, and writes the record if it has changed."""
        self.take_added()
        self.live.agree()
        if not processes.is_first():
            return
        for job in self.jobs:
            copy_best_export(job, self.folder / ADAPTERS / job.name)
        added = self.live.added
        record = self._record(
            requests=self.live.saved_requests(),
            added=list(added),
            suggested=[name for name in self.control.suggested() if name in added],
            chat_templates=self.store.chat_templates([j.settings for j in self.jobs]),
        )
        self.store.write_record(record)

    def save(self, stream: SavedStream, read_slot: ReadSlot) -> None:
        """Writes a checkpoint while the run goes on.

        Args:
            stream: The microbatches that follow.
            read_slot: Reads the states of slots as they are now.
        """
        store, jobs, control = self.store, self.jobs, self.control
        if store.is_saving:  # the disk is slower than they come
            logger.warning("round %d: waiting for the checkpoint before", self.round)
            self.send_written(waits=True)
        begun = [job for job in jobs if job.has_begun]
        for job in begun:  # copies of jobs, and jobs of other runs, have them already
            if job.references and job.name not in self._referenced:
                self.keep_references(job)
        saved = SavedRun(
            progress={job.name: job.progress for job in jobs},
            adapters={job.name: job.like for job in begun},
            optimizers={job.name: job.settings.optimizer for job in begun},
            stream=stream,
            sweep=control.saved(),
            suggested=control.suggested(),
        )
        parked = {job.name: job.parked for job in begun if job.parked is not None}
        slots = {job.name: job.slot for job in begun if job.has_slot}

        def read_states() -> dict[str, ParkedSlot]:
            return parked | {name: read_slot(slot) for name, slot in slots.items()}

        store.save(self.round, read_states, saved)

    def keep_references(self, job: JobState) -> None:
        """Writes the log-probabilities of a job's samples by its reference."""
        self.lock.check_folder()
        self._referenced.add(job.name)
        if processes.is_first():
            write_references(self.folder, job, self.model.fingerprint)

    def export(self, job: JobState) -> None:
        """Writes a job's adapter while the run goes on."""
        if job.parked is not None:
            read = functools.partial(job.parked.adapter, job.like)
        else:
            read = self.slots.begin_reading(job.slot, job.like).result
        self.store.export(self.round, job, read)

    def result(self, *, interrupted: bool) -> RunResult:
        """Returns the result of the call of `Trainer.train` that ends."""
        before, self.num_compiled = self.num_compiled, self.layout.num_compilations()
        need, peak = self.plan.need, NOT_KNOWN
        if need is not None:
            measured = measured_peak()
            peak = Comparison(predicted=need.total_bytes, measured=measured)
        adapters = self.folder / ADAPTERS
        return RunResult(
            jobs=tuple(job_result(job, adapters / job.name) for job in self.jobs),
            output_dir=self.folder,
            interrupted=interrupted,
            num_compilations=self.num_compiled - before,
            seconds=self.training_time.compared(),
            peak_bytes=peak,
        )


def is_evaluated(job: PreparedJob) -> bool:
    """Whether a job has samples to evaluate it, or the base, on."""
    return job.eval_data is not None or job.objective.needs_reference

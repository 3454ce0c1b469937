"""The trainer: many jobs on one base, from their first step to exported adapters."""

import contextlib
import dataclasses
import functools
import logging
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.adapters.slots import ReadSlot
from jaxlora.common.note import log_notes
from jaxlora.config import LoraJob, RunConfig
from jaxlora.device_check import check_device
from jaxlora.distributed import agreement, processes
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.hf.load import FrozenModel
from jaxlora.memory.footprint import StagePrograms
from jaxlora.memory.run_memory import RunMemory, read_devices
from jaxlora.run import events
from jaxlora.run.callback import Callback, Listeners
from jaxlora.run.folder import ADAPTERS, check_folder, clean_up
from jaxlora.run.identity import RunIdentity
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.lock import RunLock
from jaxlora.run.saved_run import RunRecord, SavedRequests
from jaxlora.run.saved_stream import SavedStream
from jaxlora.train.cloning import check_copy, fix_start, settings_of_copy
from jaxlora.train.compilation_cache import keep_compiled_programs
from jaxlora.train.early_exit import EarlyExit, SweepControl
from jaxlora.train.ending import StopRequest, explained
from jaxlora.train.execute.run_programs import FurtherPrograms, RunPrograms
from jaxlora.train.execute.staged_executor import StagedExecutor
from jaxlora.train.execute.stream import Border, Stream
from jaxlora.train.inbox import Inbox
from jaxlora.train.job_state import JobState, start_job
from jaxlora.train.joining import Joining
from jaxlora.train.open_run import has_held_out, open_run
from jaxlora.train.plan.prepared_job import check_comparable, prepare_job
from jaxlora.train.plan.run_plan import RunPlan
from jaxlora.train.plan.slot_spec import check_fits
from jaxlora.train.report.run_callbacks import open_callbacks
from jaxlora.train.report.summary import (
    RunResult,
    TrainingTime,
    job_result,
    sweep_report,
    write_report,
)
from jaxlora.train.requests import Requests
from jaxlora.train.saved.continue_job import continue_job, copy_best_export
from jaxlora.train.saved.describe_run import (
    check_resumes,
    resolved_settings,
    run_identity,
    saved_run,
)
from jaxlora.train.saved.job_states import JobStates, restore_jobs
from jaxlora.train.saved.run_store import RunStore

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5  # between looks for requests, if only one process trains


class Trainer:
    """Trains the jobs of a run together, each exactly as if it were alone.

    Attributes:
        plan: What was decided about the run.
        model: The frozen base.
        jobs: The jobs, in the order in which they were given.
        reader: Reads the data of jobs, with the tokenizer of the base.
        layout: The decoder on its devices.
        slots: The slots, with the adapters of running jobs.
        round: Rounds done; see `Stream`.
        output_dir: Folder of the run.
    """

    def __init__(
        self,
        config: RunConfig,
        model: FrozenModel | None = None,
        control: SweepControl | None = None,
    ):
        """Loads the base model and every job's data; trains nothing yet.

        The programs of the run are loaded or compiled meanwhile. They are kept in
        ~/.cache/jaxlora, unless JAX's settings of the compilation cache say otherwise.

        Args:
            config: The run.
            model: The base model, if it is loaded already.
            control: Decides about the jobs; None: the rules of the run's sweep do.

        Raises:
            JaxloraError: A setting, the model or a job's data cannot be used, a GPU is
                visible and JAX does not use it, or the sweep has several groups.
        """
        _check_one_group(config)
        check_device()
        keep_compiled_programs()
        opened = open_run(config, model)
        self._opened, self.plan = opened, opened.plan
        self.model, self.jobs = opened.model, opened.jobs
        self.reader = opened.reader
        self.output_dir = pathlib.Path(config.output_dir)
        self.layout, self.slots = opened.layout, opened.slots
        self._num_compiled = opened.num_compiled
        self.round, self._requests = 0, Requests()
        own = EarlyExit(config, self._is_asked_to_pause)
        self._early_exit: SweepControl = own if control is None else control
        self._joining = Joining([job.name for job in self.jobs], self._open_job)
        self._added = list(opened.joined)
        self._has_begun = False
        self._lock = RunLock(self.output_dir)
        self._listeners = Listeners([])
        self._saved_stream: SavedStream | None = None
        self._num_saved = 0  # checkpoints that were due so far
        self._looked = 0.0
        self._time = TrainingTime()

    @property
    def config(self) -> RunConfig:
        """The run; none of its settings is `auto`."""
        return self.plan.config

    def compile(self, plan: RunPlan) -> tuple[StagePrograms, ...]:
        """Compiles the passes of all stages with the settings of a plan.

        The other programs of the run are compiled beside them; see `RunPrograms`.

        Args:
            plan: The run's plan, or one with another capacity or `remat`.
        """
        return self._start_programs(plan).compiled_passes()

    def _start_programs(self, plan: RunPlan) -> RunPrograms:
        layout = self.layout.with_remat(plan.spec.options.remat)
        evaluates = any(has_held_out(job.prepared) for job in self.jobs)
        limits = plan.config.limits
        return RunPrograms.start(layout, self.slots, limits, evaluates=evaluates)

    # ---- jobs come and go: any thread may call these -------------------------------

    def add_job(self, job: LoraJob) -> None:
        """Adds a job to the run; it joins within a few microbatches.

        It starts when a slot is free, or at once if its priority is higher than that of
        a running job (`RunConfig.preempt`).

        Raises:
            JaxloraError: The name is taken, or the job does not fit the slots.
        """
        self._joining.add(job)

    def _open_job(self, settings: LoraJob) -> JobState:
        prepared = prepare_job(settings, self.model.config, self.reader)
        log_notes(prepared.notes)
        check_comparable(self.config, [*(job.prepared for job in self.jobs), prepared])
        check_fits(prepared, self.plan.spec, self.plan.config.limits.capacity)
        check_copy(self.config, self.jobs, settings)
        job = start_job(prepared, self.model)
        self._continue([job])
        return job

    def clone_job(self, name: str, new_name: str | None = None, **changes: Any) -> None:
        """Adds a copy of a job, which takes its whole state after its next batch.

        From there on, the copy trains by its own settings, as one that had trained by
        the other job's settings so far.

        Args:
            name: The job to copy.
            new_name: Name of the copy; None: that of the job with what changes.
            **changes: Settings that differ, of those in
                `jaxlora.config.clone.CHANGEABLE`.

        Raises:
            JaxloraError: There is no such job, it has ended, the name is taken, or a
                setting cannot change.
        """
        self._joining.check_name(name)
        copy = settings_of_copy(self.jobs, name, new_name, changes)
        self._joining.add(copy)

    def stop_job(self, name: str, reason: str = "stopped by request") -> None:
        """Stops a job after its current global batch; it is evaluated and exported.

        A job that waits for a slot, or is paused, ends at once.

        Raises:
            ConfigError: There is no such job.
        """
        self._joining.check_name(name)
        self._requests.stop(name, reason)

    def pause_job(self, name: str, reason: str = "paused by request") -> None:
        """Takes a job out of its slot after its current global batch, with its state.

        It does not run again before `resume_job`, also if the run is resumed in another
        process. If only paused jobs are left, the run ends.

        Raises:
            ConfigError: There is no such job.
        """
        self._joining.check_name(name)
        self._requests.pause(name, reason)

    def resume_job(self, name: str) -> None:
        """Lets a job that `pause_job` has paused continue when a slot is free.

        Raises:
            ConfigError: There is no such job.
        """
        self._joining.check_name(name)
        self._requests.resume(name)

    def _is_asked_to_pause(self, name: str) -> bool:
        return self._requests.pause_reason(name) is not None

    def _take_added(self) -> None:
        """Moves the jobs that were added into the run, in the thread that trains."""
        for job in self._joining.take():
            fix_start(job, self.jobs)
            self.jobs.append(job)
            self._added.append(job.name)
            self._send(events.JobAddEvent(round=self.round, info=job.info()))

    # ---- the run -------------------------------------------------------------------

    def train(
        self,
        *,
        resume: bool = False,
        drop_state: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> RunResult:
        """Trains until every job has ended, or until it is interrupted.

        On Ctrl-C (or SIGTERM), it finishes the microbatches that are in flight, writes
        a checkpoint and returns. Global batches that are not complete run again when
        the run is resumed.

        Args:
            resume: Continue from the newest checkpoint in `output_dir`.
            drop_state: With `resume`: end jobs that have done more steps than are
                wanted now, or that have no patience left, and drop their moments.
            callbacks: Follow the run's events; see `Callback`. They may add, stop,
                pause and resume jobs; so may other threads at any time.

        Raises:
            CheckpointError: `output_dir` holds another run or nothing to resume, is in
                use, has a damaged checkpoint, or was removed; or a job would end at
                once without `drop_state`.
            StorageError: A file cannot be written: the disk is full, for example.
            ConfigError: The device's memory cannot hold the run.
            DeviceError: A device failed.
            Exception: A callback raised it; the run can be resumed.
        """
        # Until the report is written, no other process may write to the folder.
        self._lock = RunLock(self.output_dir)
        with agreement.held(self._lock):
            processes.from_first(lambda: check_folder(self.output_dir, resume=resume))
            if self._has_begun:
                self._reset()
            self._has_begun, self._listeners = True, Listeners([])
            self._time = TrainingTime()
            self._take_added()
            if resume:
                # A refusal comes before anything is compiled.
                may_cut = functools.partial(check_resumes, drop_state=drop_state)
                identity, folder = self._identity(), self.output_dir
                prepared = [job.prepared for job in self.jobs]
                processes.from_first(lambda: may_cut(folder, identity, prepared))
            with explained(self.output_dir, self._lock):
                # A run that does not fit into memory is refused.
                self.plan = self.plan.fit(self.compile)
                self.layout = self.layout.with_remat(self.plan.spec.options.remat)
                self._start_programs(self.plan).finish()
                slots = self.plan.num_slots
                self._memory = RunMemory(self.plan.need, slots, read_devices)
                shapes = self.plan.further_limits
                with FurtherPrograms(self.layout, self.slots, shapes) as further:
                    self._further = further
                    interrupted = self._run(resume, callbacks)
            compiled_before = self._num_compiled
            self._num_compiled = self.layout.num_compilations()
            jobs = tuple(job_result(job, self._folder(job)) for job in self.jobs)
            is_first, sweep = processes.is_first(), self.config.sweep
            result = RunResult(
                jobs=jobs,
                output_dir=self.output_dir,
                interrupted=interrupted,
                num_compilations=self._num_compiled - compiled_before,
                seconds=self._time.compared(),
                peak_bytes=self._memory.compared(),
                sweep=sweep_report(self.config, self.jobs, jobs) if is_first else None,
            )
            if is_first:
                write_report(result, keep_others=sweep is None or sweep.keep_others)
        return result

    def _run(self, resume: bool, callbacks: Sequence[Callback]) -> bool:
        """Runs the jobs to their ends; returns whether a signal ended it early."""
        # Signals take effect only between microbatches, and never interrupt a
        # checkpoint.
        with StopRequest() as stop, contextlib.ExitStack() as opened:
            store = self._open_store(resume, opened)
            own = open_callbacks(self.config, self.output_dir, store.latest(), opened)
            self._listen(callbacks, own, resume)
            self._take_requests(store)
            with self._open_stream(store) as stream:
                while not (stops := self._must_end(stop.requested)):
                    if not stream.start():
                        if self._take_requests(store, waits=True):
                            continue
                        if not self._wait(store, stream, stop):
                            break
                        continue
                    if self.config.checkpoint_every:
                        store.prepare(self.slots)
                    for border in stream.run():
                        self._at_border(store, stream, border, stop)
                    self._take_requests(store)
                self.round = stream.round
                if store.latest() != self.round:
                    self._save(store, stream, stream.snapshot())
            self._send_written(store, waits=True)
            stops = stops and not all(job.progress.is_over for job in self.jobs)
            end = events.RunEndEvent(round=self.round, is_interrupted=stops)
            self._send(end)
            self._listeners.raise_failure()
            return end.is_interrupted

    def _at_border(
        self, store: RunStore, stream: Stream, border: Border, stop: StopRequest
    ) -> None:
        """Does what is due between two microbatches."""
        self._send_written(store)
        if border.ends_window or processes.count() == 1:
            # Several processes act alike only where they look at the same border.
            if self._must_end(stop.requested):
                stream.stop()
            if border.ends_window or self._is_time_to_look():
                self._take_requests(store)
        found = border.snapshot
        is_due = self._num_due(stream.round) > self._num_saved
        is_due |= border.ends_round and self._early_exit.wants_checkpoint()
        if found is None and border.ends_round and is_due:
            found = stream.snapshot()
        if found is not None:
            stream.end_round()
            self._num_saved = self._num_due(stream.round)
            self._save(store, stream, found)
        self.round = stream.round

    def _wait(self, store: RunStore, stream: Stream, stop: StopRequest) -> bool:
        """Waits for a sweep that others decide about; whether jobs may train again.

        A checkpoint is written before, as the jobs may go on in another process.
        """
        self.round = stream.round
        if self._early_exit.wants_checkpoint() and store.latest() != self.round:
            self._save(store, stream, stream.snapshot())
        self._send_written(store, waits=True)
        return self._early_exit.wait(lambda: self._must_end(stop.requested))

    def _is_time_to_look(self) -> bool:
        """Whether to look for requests before the window ends."""
        now = time.monotonic()
        if self._joining.num_waiting or now - self._looked > _LOOK_SECONDS:
            self._looked = now
            return True
        return False

    def _num_due(self, number: int) -> int:
        """Returns how many checkpoints are due by a round."""
        every = self.config.checkpoint_every
        return number // every if every else 0

    def _must_end(self, is_asked: bool) -> bool:
        """Whether a signal or a failed callback, on any process, ends the run."""
        return processes.any_of(is_asked or self._listeners.failure is not None)

    def _listen(
        self, callbacks: Sequence[Callback], own: Sequence[Callback], is_resumed: bool
    ) -> None:
        """Sends the events that follow to callbacks of the user and of the run."""
        for callback in callbacks:
            callback.trainer = self
        self._listeners = Listeners([*own, self._inbox], callbacks)
        event = events.RunStartEvent(
            round=self.round,
            jobs=tuple(job.info() for job in self.jobs),
            output_dir=self.output_dir,
            num_slots=self.plan.num_slots,
            is_resumed=is_resumed,
        )
        self._send(event)

    def _send(self, event: events.Event) -> None:
        if isinstance(event, events.WindowEvent):
            self.round = event.round
            self._time.add(event)
        self._lock.check_folder()  # callbacks would make a removed folder again
        self._listeners.send(event)

    def _open_stream(self, store: RunStore) -> Stream:
        params, limits = self.model.params, self.config.limits
        executor = StagedExecutor(
            self.layout, params, self.slots, limits, self._further.wait_for
        )
        stream = Stream(
            self.plan,
            self.jobs,
            executor,
            first_round=self.round,
            memory=self._memory,
            requests=self._requests,
            early_exit=self._early_exit,
            export=functools.partial(self._export, store),
            send=self._send,
            make_samples=None if self._opened.sampler is None else self._make_samples,
        )
        try:
            stream.restore(self._saved_stream)
        except (RuntimeError, LookupError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {self.round} of {self.output_dir} is damaged: its "
                f"microbatches break a rule ({error}). Remove its folder to resume "
                "from the checkpoint before."
            ) from error
        return stream

    def _make_samples(self, slots: Mapping[str, int]) -> dict[str, list[dict]]:
        (table,) = self.slots.tables
        assert self._opened.sampler is not None
        return self._opened.sampler.generate(slots, table)

    def _folder(self, job: JobState) -> pathlib.Path:
        return self.output_dir / ADAPTERS / job.name

    def _export(self, store: RunStore, job: JobState) -> None:
        if job.parked is not None:
            adapter = job.parked.adapter(job.like)
        else:
            adapter = self.slots.read(job.slot, job.like)
        store.export(self.round, job, adapter, self.model)

    # ---- checkpoints ---------------------------------------------------------------

    def _identity(self, jobs: Sequence[JobState] | None = None) -> RunIdentity:
        jobs = self.jobs if jobs is None else jobs
        prepared = [job.prepared for job in jobs]
        return run_identity(self.plan, self.model.fingerprint, prepared)

    def _open_store(self, resume: bool, opened: contextlib.ExitStack) -> RunStore:
        keep = self.config.keep_checkpoints
        store = RunStore(self.output_dir, self._lock, keep=keep, is_resumed=resume)
        opened.callback(store.close)
        found = store.restore(self._identity())
        if found is not None:
            self._early_exit.restore(found.run.sweep)
            self.round, self._saved_stream = found.number, found.run.stream
            self._num_saved = self._num_due(self.round)
            restore_jobs(self.jobs, found, self.slots, self.plan.num_slots)
            logger.info("resumed after round %d", self.round)
        self._requests.restore(store.saved_requests(found))
        self._continue(self.jobs)
        # This comes last, so that a refused resume leaves the folder unchanged.
        if processes.is_first():
            clean_up(self.output_dir)
        answered = {} if store.record is None else store.record.answers
        self._inbox = Inbox(self.output_dir, self, self._joining, answered)
        opened.callback(self._inbox.close)
        self._record(store)
        return store

    def _take_requests(self, store: RunStore, *, waits: bool = False) -> bool:
        """Takes users' requests, and records and answers them; see `Inbox.poll`."""
        self._lock.check_folder()
        has_taken = self._inbox.poll(waits=waits)
        self._record(store)
        self._inbox.deliver()
        return has_taken

    def _record(self, store: RunStore) -> None:
        """Adds the jobs that have joined, and writes the run's record if it changed."""
        self._take_added()
        self._requests.agree()
        if not processes.is_first():
            return
        for job in self.jobs:
            copy_best_export(job, self._folder(job))
        record = RunRecord(
            started=self._opened.started,
            identity=self._identity(),
            requests=self._requests.saved([job.name for job in self.jobs]),
            added=list(self._added),
            answers=self._inbox.answers,
        )
        store.write_record(record, lambda: resolved_settings(self.plan, self.jobs))

    def _reset(self) -> None:
        """Discards what an earlier call of `train` has left, but requests to stop."""
        self.slots = self.layout.empty_slots()
        self.round, self._num_saved, self._saved_stream = 0, 0, None
        self._early_exit.restore(None)
        for job in self.jobs:
            job.progress, job.parked = JobProgress(), None

    def continue_job_from(self, name: str, folder: pathlib.Path) -> JobProgress:
        """Gives a job that has not begun the state that it has in another run.

        The thread that trains calls this, between two microbatches.

        Args:
            name: The job.
            folder: Folder of the other run; see `LoraJob.continue_from`.

        Returns:
            Its progress there.

        Raises:
            CheckpointError: The other run has no such state, or another job's.
        """
        (job,) = (job for job in self.jobs if job.name == name)
        settings = job.settings.replace(continue_from=str(folder))
        job.prepared = dataclasses.replace(job.prepared, settings=settings)
        self._continue([job])
        return job.progress

    def _continue(self, jobs: Sequence[JobState]) -> None:
        """Gives jobs that come from another run, and are new here, their states."""
        for job in jobs:
            if job.settings.continue_from and job.progress.status == "waiting":
                continue_job(job, self._identity([job]))

    def _save(
        self, store: RunStore, stream: Stream, read_slot: ReadSlot | None
    ) -> None:
        assert read_slot is not None, "steps are in flight"
        self.round = stream.round
        if store.is_saving:  # the disk is slower than `checkpoint_every`
            logger.warning("round %d: waiting for the checkpoint before", self.round)
            self._send_written(store, waits=True)
        # Requests that were made after the record was written are in the next one.
        requests = SavedRequests() if store.record is None else store.record.requests
        saved = saved_run(
            self._identity(),
            self.jobs,
            self.model,
            requests,
            stream.saved(),
            self._early_exit.saved(),
        )
        store.save(self.round, JobStates.of(self.jobs, read_slot), saved)

    def _send_written(self, store: RunStore, *, waits: bool = False) -> None:
        """Sends events for the checkpoints and adapters that are on the disk."""
        for event in store.written(waits=waits):
            self._send(event)


def _check_one_group(config: RunConfig) -> None:
    """Refuses a sweep over several groups of devices.

    Raises:
        ConfigError: It has several groups, and each is a process of its own.
    """
    if config.sweep is not None and config.sweep.has_groups:
        raise ConfigError(
            f"sweep.groups is {config.sweep.groups_text}, and a Trainer trains one "
            "group. Call jaxlora.sweeps.engine.run.run_groups(config), or run jaxlora "
            "sweep."
        )

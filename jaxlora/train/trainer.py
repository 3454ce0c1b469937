"""The trainer: many jobs on one base, from their first step to exported adapters."""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxlora.common.comparison import NOT_KNOWN, Comparison
from jaxlora.common.note import log_notes
from jaxlora.config import LoraJob, RunConfig
from jaxlora.device_check import check_device
from jaxlora.distributed import agreement, processes
from jaxlora.errors import ConfigError
from jaxlora.hf.load import FrozenModel
from jaxlora.plan.job.prepared_job import PreparedJob, prepare_job
from jaxlora.plan.job.slot_spec import check_fits
from jaxlora.plan.memory.device_memory import measured_peak
from jaxlora.plan.memory.footprint import StagePrograms
from jaxlora.plan.resolve import check_comparable
from jaxlora.plan.run_plan import RunPlan
from jaxlora.run.callback import Callback
from jaxlora.run.folder import ADAPTERS, check_folder
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.lock import RunLock
from jaxlora.train.cloning import check_copy
from jaxlora.train.compilation_cache import keep_compiled_programs
from jaxlora.train.control import Control
from jaxlora.train.ending import explained
from jaxlora.train.job_state import JobState
from jaxlora.train.live_jobs import PAUSED, STOPPED, LiveJobs
from jaxlora.train.open_run import open_run
from jaxlora.train.report.summary import Ranking, RunResult, job_result
from jaxlora.train.saved.continue_job import continue_job
from jaxlora.train.saved.describe_run import check_not_cut, check_resumes
from jaxlora.train.saved.job_states import restore_jobs
from jaxlora.train.saved.read_checkpoint import ReadCheckpoint
from jaxlora.train.saved.references import go_on_with_reference, read_references
from jaxlora.train.saved.run_store import RunStore
from jaxlora.train.session import Session
from jaxlora.train.start_job import start_job

logger = logging.getLogger(__name__)


class RunTrainer[R: Ranking]:
    """Trains the jobs of a run together, each exactly as if it were alone.

    Attributes:
        plan: What was decided about the run.
        model: The frozen base.
        jobs: The jobs, in the order in which they were given.
        reader: Reads the data of jobs, with the tokenizer of the base.
        layout: The decoder on its devices.
        slots: The slots, with the adapters of running jobs.
        output_dir: Folder of the run.
    """

    def __init__(
        self,
        config: RunConfig,
        model: FrozenModel | None,
        control: Control[R],
        *,
        replan: bool = False,
    ):
        """Loads the base model and every job's data; trains nothing yet.

        The programs of the run are loaded or compiled meanwhile. They are kept in
        ~/.cache/jaxlora, unless JAX's settings of the compilation cache say otherwise.

        Args:
            config: The run.
            model: The base model, if it is loaded already.
            control: Decides about the jobs, and reports their ends.
            replan: If the run has begun, choose what is `auto` anew for the jobs that
                have not ended; otherwise, what was chosen when it began stays.

        Raises:
            JaxloraError: A setting, the model or a job's data cannot be used, or a GPU
                is visible and JAX does not use it.
        """
        check_device()
        keep_compiled_programs()
        self._opened = opened = open_run(config, model, replan=replan)
        self.plan, self.model = opened.plan, opened.model
        self.layout, self.slots = opened.layout, opened.slots
        self.jobs, self.reader = opened.jobs, opened.reader
        self.output_dir = pathlib.Path(config.output_dir)
        self._num_compiled = opened.num_compiled
        self._live = LiveJobs(self.jobs, opened.joined, self._open_job)
        self._control = control
        control.attach(self._live.is_asked_to_pause)
        self._has_begun = False
        self._session: Session | None = None  # the last one

    @property
    def config(self) -> RunConfig:
        """The run; none of its settings is `auto`."""
        return self.plan.config

    @property
    def round(self) -> int:
        """Rounds done; see `Stream`."""
        return 0 if self._session is None else self._session.round

    def compile(self, plan: RunPlan) -> tuple[StagePrograms, ...]:
        """Compiles the passes of all stages with the settings of a plan.

        The other programs of the run are compiled beside them; see `RunPrograms`.

        Args:
            plan: The run's plan, or one with another capacity or `remat`.
        """
        return self._opened.compile(plan)

    # ---- jobs come and go: any thread may call these -------------------------------

    def add_job(self, job: LoraJob) -> None:
        """Adds a job to the run; it joins within a few microbatches.

        It starts when a slot is free, or at once if its priority is higher than that of
        a running job (`RunConfig.preempt`).

        Raises:
            JaxloraError: The name is taken, or the job does not fit the slots.
        """
        self._live.add(job)

    def _open_job(self, settings: LoraJob) -> JobState:
        prepared = prepare_job(settings, self.model.config, self.reader)
        log_notes(prepared.notes)
        check_comparable(
            self.config.sweep, [*(job.prepared for job in self.jobs), prepared]
        )
        self._check_fits(prepared)
        check_copy(self.config, self.jobs, settings)
        job = start_job(prepared, self.model)
        self._continue([job])
        return job

    def _check_fits(self, prepared: PreparedJob) -> None:
        try:
            check_fits(prepared, self.plan.spec, self.plan.config.limits.capacity)
        except ConfigError as error:
            if not self._opened.chooses_replicas:
                raise
            raise ConfigError(
                f"{error} Or end the run (Ctrl-C), add the job to its run file and "
                "resume it with --replan (Trainer(config, replan=True)): replicas: "
                "auto then chooses replicas that hold it."
            ) from None

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
        self._live.clone(name, new_name, changes)

    def stop_job(self, name: str, reason: str = STOPPED) -> None:
        """Stops a job after its current global batch; it is evaluated and exported.

        A job that waits for a slot, or is paused, ends at once.

        Raises:
            ConfigError: There is no such job.
        """
        self._live.stop(name, reason)

    def pause_job(self, name: str, reason: str = PAUSED) -> None:
        """Takes a job out of its slot after its current global batch, with its state.

        It does not run again before `resume_job`, also if the run is resumed in another
        process. If only paused jobs are left, the run ends.

        Raises:
            ConfigError: There is no such job.
        """
        self._live.pause(name, reason)

    def resume_job(self, name: str) -> None:
        """Lets a job that `pause_job` has paused continue when a slot is free.

        Raises:
            ConfigError: There is no such job.
        """
        self._live.resume(name)

    # ---- the run -------------------------------------------------------------------

    def train(
        self,
        *,
        resume: bool = False,
        drop_state: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> RunResult[R]:
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
        lock = RunLock(self.output_dir)
        with agreement.held(lock):
            processes.from_first(lambda: check_folder(self.output_dir, resume=resume))
            if self._has_begun:
                self._reset()
            self._has_begun = True
            self._live.take()
            keep = self.config.keep_checkpoints
            with explained(self.output_dir, lock), contextlib.ExitStack() as opened:
                # A resume is refused before anything is compiled.
                if resume:
                    self._check_resumes(drop_state)
                store = RunStore(self.output_dir, lock, keep=keep, is_resumed=resume)
                opened.callback(store.close)
                found = self._restore(store)
                # A run that does not fit into memory is refused.
                run = dataclasses.replace(
                    self._opened, plan=self.plan, layout=self.layout, slots=self.slots
                ).fitted()
                self._opened, self.plan, self.layout = run, run.plan, run.layout
                self._session = session = Session(
                    run,
                    self._live,
                    self._control,
                    store,
                    found,
                    lock,
                )
                opened.pop_all()  # from here on, the session closes the files
                interrupted = session.train(callbacks, self, is_resumed=resume)
            return self._report(session, interrupted)

    def _check_resumes(self, drop_state: bool) -> None:
        identity = self._opened.identity(self.jobs)
        prepared = [job.prepared for job in self.jobs]

        def check() -> None:
            check_resumes(self.output_dir, identity, prepared)
            check_not_cut(self.output_dir, prepared, drop_state=drop_state)

        processes.from_first(check)

    def _restore(self, store: RunStore) -> ReadCheckpoint | None:
        """Restores jobs and requests; returns the checkpoint that has them, if any."""
        found = store.restore(self._opened.identity(self.jobs))
        self._drop_suggested(store, found)
        sweep, suggested = None, {}
        if found is not None:
            sweep, suggested = found.run.sweep, found.run.suggested
        self._control.restore(sweep, suggested)
        if found is not None:
            restore_jobs(self.jobs, found, self.slots, self.plan.num_slots)
            for job in [job for job in self.jobs if job.has_begun]:
                go_on_with_reference(self.output_dir, job)
                if job.lacks_references:
                    read_references(self.output_dir, job, self.model.fingerprint)
            logger.info("resumed after round %d", found.number)
        self._live.requests.restore(store.saved_requests(found))
        self._continue(self.jobs)
        return found

    def _drop_suggested(self, store: RunStore, found: ReadCheckpoint | None) -> None:
        """Drops what was suggested after the checkpoint, as it is suggested again."""
        known = {} if found is None else found.run.progress
        record = store.record
        recorded = processes.from_first(
            lambda: [] if record is None else record.suggested
        )
        # An earlier call of `train` may have suggested some that are not recorded.
        for name in {*recorded, *self._control.suggested()} - known.keys():
            if name in self._live.added:
                self._live.drop(name)

    def _reset(self) -> None:
        """Discards what an earlier call of `train` has left, but requests to stop."""
        self.slots = self.layout.empty_slots()
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
        # Not `replace`, whose rules refuse it for a copy: that has started long ago.
        settings = job.settings.model_copy(update={"continue_from": str(folder)})
        job.prepared = dataclasses.replace(job.prepared, settings=settings)
        self._continue([job])
        return job.progress

    def _continue(self, jobs: Sequence[JobState]) -> None:
        """Gives jobs that come from another run, and are new here, their states."""
        for job in jobs:
            if job.settings.continue_from and job.progress.status == "waiting":
                continue_job(job, self._opened.identity([job]))
                there = pathlib.Path(job.settings.continue_from)
                go_on_with_reference(there, job)
                if job.lacks_references:
                    read_references(there, job, self.model.fingerprint)

    def _report(self, session: Session, interrupted: bool) -> RunResult[R]:
        """Returns the result of a session, and writes and prints it."""
        compiled_before = self._num_compiled
        self._num_compiled = self.layout.num_compilations()
        adapters = self.output_dir / ADAPTERS
        jobs = tuple(job_result(job, adapters / job.name) for job in self.jobs)
        result: RunResult[R] = RunResult(
            jobs=jobs,
            output_dir=self.output_dir,
            interrupted=interrupted,
            num_compilations=self._num_compiled - compiled_before,
            seconds=session.time.compared(),
            peak_bytes=self._compared_peak(),
        )
        if not processes.is_first():
            return result
        return self._control.report(result, self.jobs, self.config)

    def _compared_peak(self) -> Comparison:
        """Returns the peak of the memory beside the prediction, if there is one."""
        need = self.plan.need
        if need is None:
            return NOT_KNOWN
        return Comparison(predicted=need.total_bytes, measured=measured_peak())

"""The trainer: many jobs on one base, from their first step to exported adapters."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.common.comparison import NOT_KNOWN, Comparison
from jaxlora.config import LoraJob, RunConfig
from jaxlora.distributed import agreement, processes
from jaxlora.hf.load import FrozenModel
from jaxlora.plan.memory.device_memory import measured_peak
from jaxlora.plan.memory.footprint import StagePrograms
from jaxlora.plan.run_plan import RunPlan
from jaxlora.run.callback import Callback
from jaxlora.run.folder import ADAPTERS, check_folder
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.lock import RunLock
from jaxlora.train.control import Control
from jaxlora.train.ending import explained
from jaxlora.train.execute.layout import Layout
from jaxlora.train.job_state import JobState
from jaxlora.train.live_jobs import PAUSED, STOPPED, LiveJobs
from jaxlora.train.live_run import LiveRun
from jaxlora.train.loop import Loop
from jaxlora.train.open_run import open_run
from jaxlora.train.report.summary import Ranking, RunResult, job_result
from jaxlora.train.restore import check_may_resume, continue_jobs, restore
from jaxlora.train.saved.run_store import RunStore


class RunTrainer[R: Ranking]:
    """Trains the jobs of a run together, each exactly as if it were alone.

    Attributes:
        model: The frozen base.
        jobs: The jobs, in the order in which they were given.
        reader: Reads the data of jobs, with the tokenizer of the base.
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
        self._run = run = open_run(config, model, replan=replan)
        self.model, self.jobs, self.reader = run.model, run.jobs, run.reader
        self.output_dir = run.folder
        self._num_compiled = run.num_compiled
        self._live = LiveJobs(self.jobs, run.joined, self._open_job)
        self._control = control
        control.attach(self._live.is_asked_to_pause)
        self._has_begun = False
        self._live_run: LiveRun | None = None  # that of the last call of `train`

    @property
    def plan(self) -> RunPlan:
        """The decisions about the run, made before it trains."""
        return self._run.plan

    @plan.setter
    def plan(self, plan: RunPlan) -> None:
        self._run = dataclasses.replace(self._run, plan=plan)

    @property
    def layout(self) -> Layout:
        """The decoder on its devices."""
        return self._run.layout

    @property
    def slots(self) -> StagedSlots:
        """The slots, with the adapters of running jobs."""
        return self._run.slots

    @property
    def config(self) -> RunConfig:
        """The run; none of its settings is `auto`."""
        return self.plan.config

    @property
    def round(self) -> int:
        """Rounds done; see `Rounds`."""
        return 0 if self._live_run is None else self._live_run.round

    def compile(self, plan: RunPlan) -> tuple[StagePrograms, ...]:
        """Compiles the passes of all stages with the settings of a plan.

        The other programs of the run are compiled beside them; see `RunPrograms`.

        Args:
            plan: The run's plan, or one with another capacity or `remat`.
        """
        return self._run.compile(plan)

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
        job = self._run.open_job(settings)
        continue_jobs(self._run, [job])
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
                saved = None
                if resume:
                    saved = check_may_resume(self._run, drop_state=drop_state)
                store = RunStore(self.output_dir, lock, saved, keep=keep)
                opened.callback(store.close)
                found = restore(self._run, self._live, self._control, store)
                # A run that does not fit into memory is refused.
                self._run = self._run.fitted()
                first = 0 if found is None else found.number
                self._live_run = run = LiveRun(
                    self._run, self._live, self._control, store, lock, first
                )
                loop = Loop(run, None if found is None else found.run.stream)
                opened.pop_all()  # from here on, the loop closes the files
                interrupted = loop.train(callbacks, self, is_resumed=resume)
            return self._report(run, interrupted)

    def _reset(self) -> None:
        """Discards what an earlier call of `train` has left, but requests to stop."""
        slots = self.layout.empty_slots()
        self._run = dataclasses.replace(self._run, slots=slots)
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
        continue_jobs(self._run, [job])
        return job.progress

    def _report(self, run: LiveRun, interrupted: bool) -> RunResult[R]:
        """Returns the result of the run, and writes its report."""
        compiled_before = self._num_compiled
        self._num_compiled = self.layout.num_compilations()
        adapters = self.output_dir / ADAPTERS
        jobs = tuple(job_result(job, adapters / job.name) for job in self.jobs)
        result: RunResult[R] = RunResult(
            jobs=jobs,
            output_dir=self.output_dir,
            interrupted=interrupted,
            num_compilations=self._num_compiled - compiled_before,
            seconds=run.time.compared(),
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

"""The trainer: many jobs on one base, from their first step to exported adapters."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.config import LoraJob, RunConfig
from jaxlora.distributed import processes
from jaxlora.hf.load import FrozenModel
from jaxlora.plan.run_plan import RunPlan
from jaxlora.run.callback import Callback
from jaxlora.run.job_progress import JobProgress
from jaxlora.train.control import Control
from jaxlora.train.execute.layout import Layout
from jaxlora.train.live_jobs import PAUSED, STOPPED
from jaxlora.train.loop import explained, train_run
from jaxlora.train.open_run import open_run
from jaxlora.train.report.summary import Ranking, RunResult


class RunTrainer[R: Ranking]:
    """A trainer whose `Control` decides about the jobs; see `Trainer`, which is one."""

    def __init__(
        self,
        config: RunConfig,
        model: FrozenModel | None,
        control: Control[R],
        *,
        replan: bool = False,
    ):
        """Opens the run; see `open_run`. `control` also reports the ends of jobs."""
        self._run = run = open_run(config, model, control, replan=replan)
        self.model, self.jobs, self.reader = run.model, run.jobs, run.reader
        self.output_dir = run.folder
        self._control = control

    @property
    def plan(self) -> RunPlan:
        """The decisions about the run, made before it trains."""
        return self._run.plan

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
        """Rounds done; see `Loop`."""
        return self._run.round

    # ---- jobs come and go: any thread may call these -------------------------------

    def add_job(self, job: LoraJob) -> None:
        """Adds a job to the run; it joins within a few microbatches.

        It starts when a slot is free, or at once if its priority is higher than that of
        a running job (`RunConfig.preempt`).

        Raises:
            JaxloraError: The name is taken, or the job does not fit the slots.
        """
        self._run.live.add(job)

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
        live = self._run.live
        live.add(live.settings_of_copy(name, new_name, changes))

    def stop_job(self, name: str, reason: str = STOPPED) -> None:
        """Stops a job after its current global batch; it is evaluated and exported.

        A job that waits for a slot, or is paused, ends at once.

        Raises:
            ConfigError: There is no such job.
        """
        self._run.live.stop(name, reason)

    def pause_job(self, name: str, reason: str = PAUSED) -> None:
        """Takes a job out of its slot after its current global batch, with its state.

        It does not run again before `resume_job`, also if the run is resumed in another
        process. If only paused jobs are left, the run ends.

        Raises:
            ConfigError: There is no such job.
        """
        self._run.live.pause(name, reason)

    def resume_job(self, name: str) -> None:
        """Lets a job that `pause_job` has paused continue when a slot is free.

        Raises:
            ConfigError: There is no such job.
        """
        self._run.live.resume(name)

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
        with self._run.locked(resume=resume):
            with explained(self._run):
                saved = self._run.begin(resume=resume, drop_state=drop_state)
                interrupted = train_run(
                    self._run, saved, callbacks, self, is_resumed=resume
                )
            result: RunResult[R] = self._run.result(interrupted=interrupted)
            if not processes.is_first():
                return result
            return self._control.report(result, self.jobs, self.config)

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
        self._run.continue_jobs([job])
        return job.progress

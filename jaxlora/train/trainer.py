"""The trainer: many jobs on one base, from first window to exported adapters."""

import contextlib
import dataclasses
import datetime
import logging
import pathlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxlora.adapters.export_record import ExportRecord
from jaxlora.adapters.peft_export import export_peft
from jaxlora.config import LoraJob, RunConfig
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.distributed import processes
from jaxlora.errors import ConfigError
from jaxlora.hf.files import tokenizer_folder
from jaxlora.hf.load import BaseModel, load_model
from jaxlora.hf.names import linear_names
from jaxlora.memory.capacity import settle
from jaxlora.models.spec import DecoderSpec
from jaxlora.train import agreement
from jaxlora.train.checkpoint import Checkpoints
from jaxlora.train.compilation_cache import keep_compiled_programs
from jaxlora.train.compile_passes import compile_stages, compile_step
from jaxlora.train.continue_job import continue_job, copy_best_export
from jaxlora.train.describe_run import check_resumes, run_identity, saved_run
from jaxlora.train.device_error import explained
from jaxlora.train.interrupt import StopRequest
from jaxlora.train.job_run import JobProgress, JobRun
from jaxlora.train.job_states import job_states, restore_jobs
from jaxlora.train.layout import Layout
from jaxlora.train.mesh_plan import plan_layout, plan_mesh
from jaxlora.train.planned_model import PlannedModel, planned_model
from jaxlora.train.prepare import check_fits, start_job
from jaxlora.train.prepared_job import prepare_job, prepare_jobs
from jaxlora.train.progress import Progress
from jaxlora.train.quantized_base import log_base, with_copies
from jaxlora.train.report import RunResult, job_result, write_report
from jaxlora.train.requests import Requests
from jaxlora.train.run_folder import (
    ADAPTERS,
    CHECKPOINTS,
    begun_settings,
    check_folder,
    check_writable,
    clean_up,
    prepare_export_folder,
    read_run_record,
    start_time,
    write_run_record,
)
from jaxlora.train.run_identity import RunIdentity
from jaxlora.train.run_lock import RunLock, check_not_in_use
from jaxlora.train.run_log import NoLog, RunLog
from jaxlora.train.saved_run import (
    RunRecord,
    SavedRequests,
)
from jaxlora.train.settle_run import settle_mesh, settle_run
from jaxlora.train.staged_executor import StagedExecutor
from jaxlora.train.windows import Windows

logger = logging.getLogger(__name__)


class Trainer:
    """Trains the jobs of a run together, each exactly as if it were alone.

    Attributes:
        config: The run.
        model: The frozen base.
        runs: The jobs, in the order in which they were given.
        output_dir: Folder of the run.
    """

    def __init__(self, config: RunConfig, model: BaseModel | None = None):
        """Loads the base model and every job's data; trains nothing yet.

        Compiled programs are kept in ~/.cache/jaxlora/xla, unless JAX's settings of the
        compilation cache say otherwise.

        Args:
            config: The run.
            model: The base model, if it is loaded already.

        Raises:
            JaxloraError: A setting, the model or a job's data cannot be used.
        """
        keep_compiled_programs()
        self.output_dir = pathlib.Path(config.output_dir)
        agreement.check_settings(config)
        processes.from_first(lambda: check_writable(self.output_dir))
        processes.from_first(lambda: check_not_in_use(self.output_dir))
        begun = processes.from_first(lambda: begun_settings(config))
        config = config.replace(**begun)
        self._started = processes.from_first(lambda: start_time(self.output_dir))
        # What the settings and the data decide is refused before weights are loaded.
        if model is None:
            folder = tokenizer_folder(config.model, config.revision)
            planned = planned_model(config, folder)
        else:
            folder, planned = model.folder, PlannedModel.of(config, model)
        now = datetime.datetime.fromisoformat(self._started)
        self._tokenizer = load_tokenizer(folder, now=now)
        jobs = prepare_jobs(config.jobs, planned.config, self._tokenizer)
        config = settle_mesh(config, planned, jobs)
        agreement.check_mesh(config)
        self.model = model or load_model(
            config.model,
            dtype=config.dtype,
            revision=config.revision,
            quantize=config.quantize_base,
            keep_bf16=config.keep_bf16,
            place=lambda found, _: plan_mesh(config, found).place(),
        )
        self.runs = [start_job(job, self.model) for job in jobs]
        agreement.check_inputs(self.model.fingerprint, self.runs)
        settled = settle_run(config, PlannedModel.of(config, self.model), jobs)
        self.config, self._bounds, spec = settled.config, settled.bounds, settled.spec
        self.model = with_copies(self.model, spec.options.base_format)
        log_base(spec)
        mesh = plan_mesh(self.config, self.model.config)
        self._placed = plan_layout(self.config, mesh, spec, self.model, self.runs)
        self._slots = self._layout.empty_slots()
        self._round = 0
        self._requests = Requests()
        self._adding = threading.Lock()
        self._names = [run.job.name for run in self.runs]  # also of jobs in _added
        self._added: deque[JobRun] = deque()  # jobs that join before the next window
        self._has_begun = False
        self._lock = RunLock(self.output_dir)
        self._recorded: RunRecord | None = None

    @property
    def _spec(self) -> DecoderSpec:
        return self._placed.spec

    @property
    def _layout(self) -> Layout:
        return self._placed.layout

    def _compile_step(self, config: RunConfig) -> jax.stages.Compiled:
        """Compiles the training step with other settings, which then stay."""
        if config.least_remat != self._spec.options.remat:
            self._placed = self._placed.with_remat(config.least_remat)
        params, limits = self.model.params, config.limits
        return compile_step(self._layout, params, self._slots, limits)

    # ---- jobs come and go: any thread may call these -------------------------------

    def add_job(self, job: LoraJob) -> None:
        """Adds a job to the run; it joins before the next window.

        It starts when a slot is free, or at once if its priority is higher than that of
        a running job (`RunConfig.preempt`).

        Raises:
            JaxloraError: The name is taken, or the job does not fit the slots.
        """
        with self._adding:
            if job.name.lower() in {name.lower() for name in self._names}:
                raise ConfigError(f"a job named {job.name!r} is in this run already.")
            prepared = prepare_job(job, self.model.config, self._tokenizer)
            check_fits(prepared, self._spec)
            run = start_job(prepared, self.model)
            self._continue([run])
            self._names.append(job.name)
            self._added.append(run)

    def stop_job(self, name: str, reason: str = "stopped by request") -> None:
        """Stops a job after its current global batch; it is evaluated and exported.

        A job that waits for a slot, or is paused, ends before the next window.

        Raises:
            ConfigError: There is no such job.
        """
        self._check_name(name)
        self._requests.stop(name, reason)

    def pause_job(self, name: str, reason: str = "paused by request") -> None:
        """Takes a job out of its slot after the current window, with all its state.

        It does not run again before `resume_job`, also if the run is resumed in another
        process. If only paused jobs are left, the run ends.

        Raises:
            ConfigError: There is no such job.
        """
        self._check_name(name)
        self._requests.pause(name, reason)

    def resume_job(self, name: str) -> None:
        """Lets a job that `pause_job` has paused continue when a slot is free.

        Raises:
            ConfigError: There is no such job.
        """
        self._check_name(name)
        self._requests.resume(name)

    def _check_name(self, name: str) -> None:
        if name not in self._names:
            raise ConfigError(
                f"there is no job {name!r}; there are: {', '.join(self._names)}."
            )

    def _take_added(self) -> None:
        """Moves the jobs that were added into the run, in the thread that trains."""
        for run in agreement.take_added(tuple(self._added)):
            self._added.remove(run)
            self.runs.append(run)

    # ---- the run -------------------------------------------------------------------

    def train(
        self,
        *,
        resume: bool = False,
        on_window: Callable[["Trainer"], None] | None = None,
    ) -> RunResult:
        """Trains until every job has ended, or until it is interrupted.

        On Ctrl-C (or SIGTERM), it finishes the current window, writes a checkpoint and
        returns.

        Args:
            resume: Continue from the newest checkpoint in `output_dir`.
            on_window: Called after each window. It may add, stop, pause and resume
                jobs; so may other threads at any time.

        Raises:
            CheckpointError: `output_dir` holds another run or nothing to resume, is in
                use by another process, or has a damaged checkpoint.
            StorageError: A file cannot be written: the disk is full, for example.
            ConfigError: The device's memory cannot hold the run.
            DeviceError: A device failed.
        """
        # Until the report is written, no other process may write to the folder.
        with agreement.held(RunLock(self.output_dir)) as self._lock:
            processes.from_first(lambda: check_folder(self.output_dir, resume=resume))
            if self._has_begun:
                self._reset()
            self._has_begun = True
            self._take_added()
            if resume:
                # A refusal comes before anything is compiled.
                identity = self._identity()
                processes.from_first(lambda: check_resumes(self.output_dir, identity))
            compiled_before = self._layout.num_compilations()
            with explained(self.output_dir):
                self._compile()
                interrupted = self._run(resume, on_window)
            result = RunResult(
                jobs=tuple(job_result(run, self._folder(run)) for run in self.runs),
                output_dir=self.output_dir,
                interrupted=interrupted,
                num_compilations=self._layout.num_compilations() - compiled_before,
            )
            if processes.is_first():
                write_report(result)
        return result

    def _compile(self) -> None:
        """Compiles the passes; a step that does not fit into memory is refused."""
        if len(self._layout.stages) > 1:
            params, limits = self.model.params, self.config.limits
            compile_stages(self._layout, params, self._slots, limits)
            return
        self.config = settle(
            self.config,
            self._spec,
            self._bounds,
            self._compile_step,
            is_pinned=self._placed.lanes.pinned,
        )

    def _run(self, resume: bool, on_window: Callable[["Trainer"], None] | None) -> bool:
        """Runs one window after another; returns whether a signal ended it early."""
        # Signals take effect only between windows, and never interrupt a checkpoint.
        with StopRequest() as stop, contextlib.ExitStack() as opened:
            checkpoints = self._open_checkpoints(resume, opened)
            is_first, newest = processes.is_first(), checkpoints.latest()
            log = RunLog(self.output_dir, keep_rounds=newest) if is_first else NoLog()
            opened.callback(log.close)
            progress = Progress(self.runs, is_shown=is_first)
            opened.enter_context(progress)
            with self._windows(log, progress) as windows:
                while not (stops := processes.any_of(stop.requested)):
                    if not windows.start():
                        break
                    before = self._round
                    windows.run_next()
                    self._round = windows.round
                    if on_window is not None:
                        self._call(on_window, checkpoints)
                    self._record()
                    every = self.config.checkpoint_every
                    if every and self._round // every > before // every:
                        self._save(checkpoints)
                self._round = windows.round
            self._save_latest(checkpoints)
            is_over = all(run.progress.is_over for run in self.runs)
            return stops and not is_over

    def _call(
        self, on_window: Callable[["Trainer"], None], checkpoints: Checkpoints
    ) -> None:
        """Calls the user's function; if it fails, all windows so far are saved."""
        try:
            on_window(self)
        except BaseException:
            # A checkpoint needs all processes, and the function may fail on one only.
            if processes.count() == 1:
                logger.exception("on_window failed; writing a checkpoint first")
                self._record()
                self._save_latest(checkpoints)
            raise

    def _windows(self, log: RunLog | NoLog, progress: Progress) -> Windows:
        assert self._spec.slots is not None
        executor = StagedExecutor(
            self._layout, self.model.params, self._slots, self.config.limits
        )
        return Windows(
            self.config,
            self.runs,
            executor,
            num_slots=self._spec.slots.num_slots,
            placed=self._placed,
            first_round=self._round,
            requests=self._requests,
            export=self._export,
            log=log,
            progress=progress,
        )

    def _folder(self, run: JobRun) -> pathlib.Path:
        return self.output_dir / ADAPTERS / run.job.name

    def _export(self, run: JobRun) -> None:
        step = run.progress.step
        if run.parked is not None:
            adapter = run.parked.adapter(run.start)
        else:
            adapter = self._slots.read(run.slot, run.start)
        if not processes.is_first():
            return
        self._lock.check()
        if not prepare_export_folder(self._folder(run), step):
            return
        export_peft(
            adapter,
            self._folder(run),
            base_model=self.model.source,
            revision=self.model.revision,
            linear_names=linear_names(self.model.config),
            record=ExportRecord(job=run.job.name, step=step),
        )

    # ---- checkpoints ---------------------------------------------------------------

    def _identity(self, runs: Sequence[JobRun] | None = None) -> RunIdentity:
        jobs = self.runs if runs is None else runs
        return run_identity(self.config, self.model.fingerprint, self._spec, jobs)

    def _open_checkpoints(
        self, resume: bool, opened: contextlib.ExitStack
    ) -> Checkpoints:
        folder = self.output_dir / CHECKPOINTS
        is_first = processes.is_first()
        record: RunRecord | None = None

        def saved_requests() -> dict[str, Any] | None:
            nonlocal record
            record = read_run_record(self.output_dir) if resume else None
            return None if record is None else dataclasses.asdict(record.requests)

        # All processes put the same requests into force.
        requests = processes.from_first(saved_requests)
        is_anew = agreement.newest_for_all(folder) is None
        if resume and is_anew:
            logger.warning("there is no complete checkpoint: training from the start")
        keep = self.config.keep_checkpoints
        checkpoints = Checkpoints(folder, keep=keep, is_writer=is_first)
        opened.callback(checkpoints.close)
        if requests is not None:
            self._requests.restore(SavedRequests(**requests))
        if not is_anew:
            self._restore(checkpoints)
        self._continue(self.runs)
        # This comes last, so that a refused resume leaves the folder unchanged.
        if is_first:
            clean_up(self.output_dir, [run.job.name for run in self.runs])
        self._recorded = record
        self._record()
        return checkpoints

    def _record(self) -> None:
        """Takes up jobs that were added, and writes the run's record if it changed."""
        self._take_added()
        self._requests.agree()
        if not processes.is_first():
            return
        for run in self.runs:
            copy_best_export(run, self._folder(run))
        record = RunRecord(
            started=self._started,
            identity=self._identity(),
            requests=self._saved_requests(),
        )
        if record != self._recorded:
            write_run_record(self.output_dir, record)
            self._recorded = record

    def _saved_requests(self) -> SavedRequests:
        """Returns the requests for jobs that have joined the run."""
        return self._requests.saved([run.job.name for run in self.runs])

    def _reset(self) -> None:
        """Discards the state of an earlier call of `train`, except requests to stop.

        That call may have ended at any point, with gradients pending.
        """
        self._slots = self._layout.empty_slots()
        self._round = 0
        for run in self.runs:
            run.progress, run.parked = JobProgress(), None

    def _continue(self, runs: Sequence[JobRun]) -> None:
        """Gives jobs that come from another run, and are new here, their states."""
        for run in runs:
            if run.job.continue_from and run.progress.status == "waiting":
                continue_job(run, self._identity([run]))

    def _restore(self, checkpoints: Checkpoints) -> None:
        found = checkpoints.restore(self._identity())
        self._round = found.number
        self._requests.restore(found.run.requests)
        assert self._spec.slots is not None
        restore_jobs(self.runs, found, self._slots, self._spec.slots.num_slots)
        logger.info("resumed after round %d", self._round)

    def _save_latest(self, checkpoints: Checkpoints) -> None:
        """Writes a checkpoint of the current round, unless it exists."""
        if checkpoints.latest() != self._round:
            self._save(checkpoints)

    def _save(self, checkpoints: Checkpoints) -> None:
        if processes.is_first():
            self._lock.check()
        requests = self._saved_requests()
        saved = saved_run(self._identity(), self.runs, self.model, requests)
        states = job_states(self.runs, self._slots)
        checkpoints.save(self._round, states, saved)

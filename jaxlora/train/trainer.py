"""The trainer: many jobs on one base, from first round to exported adapters."""

import dataclasses
import datetime
import logging
import pathlib
import time
from collections.abc import Callable

import jax.numpy as jnp

from jaxlora.atomic import write_text
from jaxlora.config import LoraJob, RunConfig
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.hf.load import BaseModel, load_base
from jaxlora.hf.names import linear_names
from jaxlora.hf.peft_export import export_peft
from jaxlora.train import prepare
from jaxlora.train.checkpoint import Checkpoints, RunIdentity, SavedRun
from jaxlora.train.interrupt import StopRequest
from jaxlora.train.job_run import JobProgress, JobRun
from jaxlora.train.progress import Progress
from jaxlora.train.report import RunResult, job_result, write_report
from jaxlora.train.rounds import Rounds, StepOutcome
from jaxlora.train.run_log import METRICS_FILE, RunLog
from jaxlora.train.slots import SlotTable
from jaxlora.train.step import CompiledSteps, announced
from scheduler import Limits, greedy

logger = logging.getLogger(__name__)

_STARTED_FILE = "started.txt"


class Trainer:
    """Trains the jobs of a run together, each exactly as if it were alone.

    Attributes:
        config: The run.
        model: The frozen base.
        runs: The jobs, in the order in which they were given.
        output_dir: Where everything goes.
    """

    def __init__(self, config: RunConfig, model: BaseModel | None = None):
        """Loads the base model and every job's data; trains nothing yet.

        Args:
            config: The run.
            model: The base model, where it is loaded already.

        Raises:
            JaxloraError: Something that the user gave cannot be used.
        """
        self.config = config
        self.output_dir = pathlib.Path(config.output_dir)
        self.model = model or load_base(
            config.model, dtype=config.dtype, revision=config.revision
        )
        self._started = self._start_time()
        self._tokenizer = load_tokenizer(self.model.folder, now=self._started)
        self._tokenizer.check_fits(self.model.config.vocab_size)
        self.runs = [self._open(job) for job in config.jobs]
        self._spec = prepare.decoder_spec(config, self.model, self.runs)
        self._use_dropout = config.slot_dropout
        if self._use_dropout is None:
            self._use_dropout = any(job.dropout > 0 for job in config.jobs)
        for run in self.runs:
            self._check_fits(run)
        self._steps = CompiledSteps(self._spec)
        self._table = SlotTable(self._spec, self._steps)
        self._rounds = Rounds(
            self._spec,
            self.model.params,
            self._table,
            self._steps,
            Limits(capacity=config.microbatch_tokens, block_tokens=config.block_tokens),
            greedy.pack,
            use_dropout=self._use_dropout,
        )
        self._round = 0
        self._stopping: dict[str, str] = {}

    def _start_time(self) -> datetime.datetime:
        """When the run began, first of all: chat templates may print the date."""
        path = self.output_dir / _STARTED_FILE
        if path.exists():
            return datetime.datetime.fromisoformat(path.read_text().strip())
        return datetime.datetime.now()

    def _open(self, job: LoraJob) -> JobRun:
        return prepare.open_job(job, self.model, self._tokenizer)

    def _check_fits(self, run: JobRun) -> None:
        prepare.check_fits(run, self._spec, use_dropout=bool(self._use_dropout))

    # ---- jobs come and go ----------------------------------------------------------

    def add_job(self, job: LoraJob) -> None:
        """Lets a job join the run, at the next round with a free slot.

        Raises:
            JaxloraError: The name is taken, or the job does not fit the slots.
        """
        names = {run.job.name.lower() for run in self.runs}
        if job.name.lower() in names:
            raise ConfigError(f"a job named {job.name!r} is in this run already.")
        run = self._open(job)
        self._check_fits(run)
        self.runs.append(run)

    def stop_job(self, name: str, reason: str = "stopped by request") -> None:
        """Ends a job after the round under way, and exports it; a waiting one now."""
        named = {run.job.name: run for run in self.runs}
        if name not in named:
            raise ConfigError(
                f"there is no job {name!r}; there are: {', '.join(named)}."
            )
        if named[name].progress.status == "waiting":
            named[name].update(status="stopped", reason=reason)
        self._stopping[name] = reason

    def _running(self) -> list[JobRun]:
        return [run for run in self.runs if run.progress.status == "running"]

    def _fill_slots(self) -> list[JobRun]:
        """Starts waiting jobs in the free slots; returns them."""
        assert self._spec.slots is not None
        taken = {run.slot for run in self._running()}
        free = [g for g in range(self._spec.slots.num_slots) if g not in taken]
        waiting = [run for run in self.runs if run.progress.status == "waiting"]
        started = [run for _, run in zip(free, waiting, strict=False)]
        for slot, run in zip(free, started, strict=False):
            self._table.load(slot, run.start)
            self._table.activate(slot, run.start)
            run.update(status="running", slot=slot)
        return started

    # ---- the run -------------------------------------------------------------------

    def train(
        self,
        *,
        resume: bool = False,
        on_round: Callable[["Trainer"], None] | None = None,
    ) -> RunResult:
        """Trains until every job has ended, or until it is interrupted.

        Ctrl-C (or SIGTERM) ends the round under way, writes a checkpoint and returns.

        Args:
            resume: Continue from the newest checkpoint in `output_dir`.
            on_round: Called after each round; may call `add_job` and `stop_job`.

        Raises:
            CheckpointError: `output_dir` holds another run, or nothing to resume.
        """
        checkpoints = self._open_checkpoints(resume)
        log = RunLog(self.output_dir, keep_rounds=checkpoints.latest())
        try:
            with StopRequest() as stop, Progress(self.runs) as progress:
                while self._start_round(log) and not stop.requested:
                    self._one_round(log, progress)
                    if on_round is not None:
                        on_round(self)
                    every = self.config.checkpoint_every
                    if every and self._round % every == 0:
                        self._save(checkpoints)
                if checkpoints.latest() != self._round:
                    self._save(checkpoints)
                interrupted = stop.requested
        finally:
            checkpoints.close()
            log.close()
        results = tuple(job_result(run, self._folder(run)) for run in self.runs)
        result = RunResult(
            jobs=results,
            output_dir=self.output_dir,
            interrupted=interrupted,
            num_compilations=self._steps.num_compilations(),
        )
        write_report(result)
        return result

    def _start_round(self, log: RunLog) -> bool:
        """Fills the slots and evaluates the newcomers; False when no job is left."""
        started = self._fill_slots()
        for run in started:
            logger.info("%s starts in slot %d", run.job.name, run.slot)
        self._evaluate([run for run in started if run.wants_eval()], log)
        self._end_jobs(log)
        return bool(self._running()) or any(
            run.progress.status == "waiting" for run in self.runs
        )

    def _one_round(self, log: RunLog, progress: Progress) -> None:
        running = self._running()
        if not running:
            return  # every newcomer ended at its first evaluation
        began = time.perf_counter()
        with announced(self._steps.accumulate, "the training step"):
            outcomes = self._rounds.train(running)
        seconds = time.perf_counter() - began
        self._round += 1
        for run in running:
            self._note(run, outcomes[run.job.name], log)
        self._log_round(log, outcomes, seconds)
        self._evaluate(
            [r for r in running if r.progress.status == "running" and r.wants_eval()],
            log,
        )
        self._end_jobs(log)
        progress.update(outcomes, seconds)
        if self._round % self.config.log_every == 0:
            progress.log_line(self._round, outcomes, seconds)

    def _note(self, run: JobRun, outcome: StepOutcome, log: RunLog) -> None:
        if not outcome.is_finite:
            run.update(
                status="failed",
                reason=f"loss {outcome.loss:g} with gradient norm "
                f"{outcome.grad_norm:g} in step {run.progress.step + 1} is not finite; "
                "lower learning_rate or set max_grad_norm",
            )
            return
        run.note_step(outcome.loss, outcome.num_tokens)
        log.event(
            "step",
            self._round,
            job=run.job.name,
            step=run.progress.step,
            **dataclasses.asdict(outcome),
        )

    def _log_round(self, log: RunLog, outcomes, seconds: float) -> None:
        schedule = self._rounds.last_schedule
        assert schedule is not None
        tokens = sum(outcome.num_tokens for outcome in outcomes.values())
        log.event(
            "round",
            self._round,
            num_tokens=tokens,
            seconds=round(seconds, 4),
            tokens_per_second=round(tokens / seconds, 1),
            num_microbatches=len(schedule.microbatches),
            fill=round(schedule.fill, 4),
        )

    def _evaluate(self, runs: list[JobRun], log: RunLog) -> None:
        if not runs:
            return
        with announced(self._steps.evaluate, "the evaluation"):
            losses = self._rounds.evaluate(runs)
        for run in runs:
            loss = losses[run.job.name]
            if loss != loss:
                run.update(status="failed", reason="the evaluation loss is not finite")
                continue
            is_best = run.note_eval(loss)
            if is_best and run.job.keep_best:
                self._export(run)
            log.event(
                "eval",
                self._round,
                job=run.job.name,
                step=run.progress.step,
                eval_loss=loss,
                is_best=is_best,
            )

    def _end_jobs(self, log: RunLog) -> None:
        """Exports and frees the slots of the jobs that have just ended."""
        for run in self.runs:
            status = run.progress.status
            if status == "running":
                self._decide(run)
            if run.progress.status == "running" or run.progress.slot is None:
                continue
            if run.progress.status != "failed" and not run.job.keep_best:
                self._export(run)
            self._table.clear(run.slot)
            run.update(slot=None)
            ended = run.progress
            logger.info("%s: %s. %s", run.job.name, ended.status, ended.reason)
            log.event(
                "job",
                self._round,
                job=run.job.name,
                step=ended.step,
                status=ended.status,
                reason=ended.reason,
            )

    def _decide(self, run: JobRun) -> None:
        if run.progress.step >= run.num_steps:
            run.update(status="finished", reason="all steps are done")
        elif run.has_stalled():
            run.update(
                status="stopped early",
                reason=f"no better evaluation for {run.job.early_stopping} evaluations",
            )
        elif run.job.name in self._stopping:
            run.update(status="stopped", reason=self._stopping[run.job.name])

    def _folder(self, run: JobRun) -> pathlib.Path:
        return self.output_dir / "adapters" / run.job.name

    def _export(self, run: JobRun) -> None:
        adapter = self._table.read(run.slot, run.start)
        export_peft(
            adapter,
            self._folder(run),
            base_model=self.model.source,
            linear_names=linear_names(self.model.config),
        )

    # ---- checkpoints ---------------------------------------------------------------

    def _identity(self) -> RunIdentity:
        assert self._spec.slots is not None
        return RunIdentity(
            base=self.model.fingerprint,
            settings={
                "dtype": jnp.dtype(self.model.dtype).name,
                "microbatch_tokens": self.config.microbatch_tokens,
                "block_tokens": self.config.block_tokens,
                "max_concurrent_jobs": self._spec.slots.num_slots,
                "slot_rank": self._spec.slots.rank,
            },
            jobs={
                run.job.name: run.job.model_dump(mode="json")
                | {"data_fingerprint": run.data_fingerprint}
                for run in self.runs
            },
        )

    def _open_checkpoints(self, resume: bool) -> Checkpoints:
        has_run = (self.output_dir / METRICS_FILE).exists()
        if has_run and not resume:
            raise CheckpointError(
                f"{self.output_dir} already holds a run. Resume it (resume=True, or "
                "--resume), or choose another output_dir."
            )
        if resume and not has_run:
            raise CheckpointError(
                f"{self.output_dir} holds no run to resume. Is output_dir right? Else "
                "start without resume."
            )
        write_text(self.output_dir / _STARTED_FILE, self._started.isoformat() + "\n")
        folder = self.output_dir / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints = Checkpoints(folder, keep=self.config.keep_checkpoints)
        if resume and checkpoints.latest() is None:
            logger.warning("the run ended before its first checkpoint: starting anew")
        elif resume:
            self._restore(checkpoints)
        return checkpoints

    def _restore(self, checkpoints: Checkpoints) -> None:
        self._round, saved, self._table.state = checkpoints.restore(
            self._table.state, self._identity()
        )
        for run in self.runs:
            run.progress = JobProgress(**saved.progress[run.job.name])
            if run.progress.status == "running":
                self._table.activate(run.slot, run.start)
        logger.info("resumed after round %d", self._round)

    def _save(self, checkpoints: Checkpoints) -> None:
        def adapter(run: JobRun) -> dict:
            return {
                "modules": {
                    name: (weights.rank, weights.lora_alpha)
                    for name, weights in run.start.modules.items()
                },
                "use_rslora": run.start.use_rslora,
                "dropout": run.start.dropout,
            }

        saved = SavedRun(
            identity=self._identity(),
            progress={r.job.name: dataclasses.asdict(r.progress) for r in self.runs},
            adapters={run.job.name: adapter(run) for run in self.runs},
            base_model=self.model.source,
            linear_names=list(linear_names(self.model.config)),
        )
        checkpoints.save(self._round, self._table.state, saved)

"""The report of a run: a table, a plot and a summary file."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.table import Table

from jaxlora.common.atomic import write_text
from jaxlora.common.console import literal, plain_table, show
from jaxlora.config.clone import CloneOf
from jaxlora.plan.memory.device_memory import format_bytes
from jaxlora.printable import one_line
from jaxlora.run.events import JobInfo, WindowEvent
from jaxlora.run.folder import PICTURE, SUMMARY_FILE
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.log import METRICS_FILE
from jaxlora.run.status_view import format_seconds
from jaxlora.train.job_state import JobState
from jaxlora.train.report.plot import plot_losses
from jaxlora.train.report.progress import format_losses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A prediction beside what was measured in this process; None: it is not known."""

    predicted: float | None = None
    measured: float | None = None

    def line(self, name: str, show: Callable[[float], str]) -> Iterator[str]:
        """Yields a line with both, if both are known.

        Args:
            name: What they are.
            show: Formats either.
        """
        if not self.predicted or self.measured is None:
            return
        more = self.measured / self.predicted - 1
        off = f"{abs(more):.1%} {'more' if more >= 0 else 'less'}"
        yield f"{name}: {show(self.measured)}, {show(self.predicted)} predicted ({off})"


NOT_KNOWN = Comparison()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobResult(JobInfo):
    """Result of one job.

    Attributes:
        folder: PEFT folder of the job; None if there is none.
    """

    folder: pathlib.Path | None

    @property
    def clone_of(self) -> CloneOf | None:
        """Job and step whose state it started from; None if it started anew."""
        return self.settings.clone_of


@runtime_checkable
class Ranking(Protocol):
    """The ranked configurations of a sweep, as far as a run's report names them."""

    @property
    def kept(self) -> Sequence[str]:
        """Names of the best ones."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunResult[R: Ranking]:
    """Result of a run.

    Attributes:
        jobs: Results of the jobs, in the order in which they were given.
        output_dir: Folder of the run.
        interrupted: Whether a signal ended the run early; `resume` continues it.
        num_compilations: Programs compiled in this run, without those that an earlier
            run of this process had compiled.
        seconds: Time of training, without evaluations and exports.
        peak_bytes: Peak memory of the device that needed the most.
        sweep: The ranked configurations; None without `sweep` in the run.
    """

    jobs: tuple[JobResult, ...]
    output_dir: pathlib.Path
    interrupted: bool
    num_compilations: int
    seconds: Comparison = NOT_KNOWN
    peak_bytes: Comparison = NOT_KNOWN
    sweep: R | None = None


class TrainingTime:
    """The predicted and the measured time of the windows of a run."""

    def __init__(self):
        self._predicted: float | None = 0.0
        self._measured = 0.0

    def add(self, window: WindowEvent) -> None:
        """Counts a window."""
        self._measured += window.seconds
        if window.predicted_seconds is None:
            self._predicted = None
        elif self._predicted is not None:
            self._predicted += window.predicted_seconds

    def compared(self) -> Comparison:
        """Returns the times of all windows."""
        if not self._measured:
            return NOT_KNOWN
        return Comparison(predicted=self._predicted, measured=self._measured)


def job_result(job: JobState, folder: pathlib.Path) -> JobResult:
    """Makes the result of one job."""
    info, progress, keep_best = job.info(), job.progress, job.settings.keep_best
    # This run may not have written an adapter yet, where an older run has.
    is_written = keep_best or progress.is_over
    is_exported = progress.exported_step(keep_best=keep_best) is not None
    has_adapter = is_written and is_exported and folder.is_dir()
    values = {
        field.name: getattr(info, field.name) for field in dataclasses.fields(info)
    }
    return JobResult(**values, folder=folder if has_adapter else None)


def _change(first: float | None, last: float | None, *, is_same: bool) -> str:
    """Formats the first and last loss, with a dash for a missing one.

    Args:
        first: First loss; None if there is none.
        last: Latest loss; None if there is none.
        is_same: Whether both are the same measurement, so there is no later one.
    """
    if first is None or last is None:
        return "-"
    return f"{first:.3f} → {'-' if is_same else f'{last:.3f}'}"


def _best(progress: JobProgress) -> str:
    """Formats the first held-out loss, and the lowest one with its step."""
    first, best, step = progress.first_eval, progress.best_eval, progress.best_step
    change = _change(first, best, is_same=progress.last_eval_step == 0)
    return change if progress.last_eval_step in (None, 0) else f"{change} at {step}"


def ranked(jobs: Iterable[JobResult]) -> list[JobResult]:
    """Sorts jobs by their lowest held-out loss; those without one come last."""

    def place(job: JobResult) -> float:
        best = job.progress.best_eval
        return math.inf if best is None else best

    return sorted(jobs, key=place)


def _title(num_jobs: int) -> str:
    if num_jobs == 1:
        return "1 adapter"
    return f"{num_jobs} adapters, trained together on one base"


def summary_table(result: RunResult) -> Table:
    """Makes a table with one row per job, the lowest held-out loss first."""
    table = plain_table(title=_title(len(result.jobs)), title_justify="left")
    # On narrow terminals, names and statuses are folded, and numbers stay whole.
    table.add_column("job", overflow="fold")
    for column in ("rank", "steps", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("train loss", "best held-out loss"):
        table.add_column(column, no_wrap=True)
    table.add_column("status")
    for job in ranked(result.jobs):
        p = job.progress
        table.add_row(
            literal(job.name),
            str(job.rank),
            f"{p.step}/{job.num_steps}",
            f"{p.num_tokens:,}",
            _change(p.first_loss, p.last_loss, is_same=p.step == 1),
            _best(p),
            p.shown_status(is_live=False),
        )
    return table


def print_jobs(result: RunResult, console: Console) -> None:
    """Prints the table, where the PEFT folders are, and why jobs ended early."""
    show(console, summary_table(result))
    for job in result.jobs:
        last, sets = job.progress.last_eval, job.progress.last_eval_sets
        if last is not None and sets:
            losses = one_line(format_losses(last, sets))
            show(console, f"{job.name}: last held-out {losses}", soft_wrap=True)
    for job in result.jobs:
        if job.folder is not None:
            show(console, f"PEFT folder: {job.folder}", soft_wrap=True)
    for job in result.jobs:
        if job.progress.status not in ("finished", "running", "waiting"):
            why = one_line(f"{job.progress.status}: {job.progress.reason}")
            show(console, f"{job.name}: {why}")
    for line in (
        *result.seconds.line("time of training", _seconds),
        *result.peak_bytes.line("peak memory", format_bytes),
    ):
        show(console, line, soft_wrap=True)


def _seconds(seconds: float) -> str:
    """Formats a time, with tenths of a second if it is short."""
    return f"{seconds:.1f} s" if seconds < 600 else format_seconds(seconds)


def write_report(result: RunResult) -> None:
    """Writes summary.json and losses.png into the run's folder."""
    jobs = {
        job.name: {
            "rank": job.rank,
            "num_modules": job.num_modules,
            "num_steps": job.num_steps,
            "clone_of": job.clone_of and job.clone_of.model_dump(),
            "folder": str(job.folder) if job.folder and job.folder.is_dir() else None,
            **dataclasses.asdict(job.progress),
            "status": job.progress.shown_status(is_live=False),
        }
        for job in result.jobs
    }
    summary: dict[str, Any] = {
        "jobs": jobs,
        "interrupted": result.interrupted,
        "seconds": dataclasses.asdict(result.seconds),
        "peak_bytes": dataclasses.asdict(result.peak_bytes),
    }
    if result.sweep is not None:
        summary["best"] = list(result.sweep.kept)
    text = json.dumps(summary, indent=2)
    write_text(result.output_dir / SUMMARY_FILE, text + "\n")
    plot_losses(result.output_dir / METRICS_FILE, result.output_dir / PICTURE)

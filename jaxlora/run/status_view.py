"""Shows the state of a run in a few lines, the most urgent first.

One overall bar comes first, then the number of jobs by status, then a line for each job
that runs; jobs that have ended are only counted. So forty jobs fit on a terminal of 24
lines, and what does not fit is counted as well.
"""

import dataclasses
import datetime
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxlora.common.console import literal, plain_table, show
from jaxlora.run.job_progress import JobStatus
from jaxlora.run.live.status_file import SavedStatus
from jaxlora.run.lock import Owner
from jaxlora.run.status import RunStatus

_NARROW = 64  # columns below which jobs have no bars
_ORDER = ("running", "paused", "waiting")
_STYLES = {
    "failed": "red",
    "running": "green",
    "paused": "yellow",
    "interrupted": "yellow",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StatusView:
    """Prints the state of a run with rich.

    Attributes:
        status: State of the run.
        max_lines: Lines that may be used, at least 4; None: as many as needed.
    """

    status: RunStatus
    max_lines: int | None = None

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        is_narrow = options.max_width < _NARROW
        yield from _head(self.status, is_narrow)
        current = [job for job in self.status.jobs if not job.progress.is_over]
        jobs = in_display_order(current)
        room = len(jobs) if self.max_lines is None else self.max_lines - 3
        shown = jobs if len(jobs) <= room + 1 else jobs[:room]
        if shown:
            yield _job_lines(self.status, shown, is_narrow)
        if left := jobs[len(shown) :]:
            yield Text(f"+ {len(left)} more", style="dim")


def in_display_order(jobs: Sequence[JobStatus]) -> list[JobStatus]:
    """Sorts jobs: running ones first, then paused, waiting and ended ones."""
    place = {status: i for i, status in enumerate(_ORDER)}
    return sorted(jobs, key=lambda job: place.get(job.progress.status, len(place)))


def _head(status: RunStatus, is_narrow: bool) -> Iterator[Table | Text]:
    """Yields the overall bar, and the number of jobs by status."""
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    words = [f"{status.done_fraction:.0%}"]
    if status.tokens_per_second is not None and not is_narrow:
        words.append(f"{status.tokens_per_second:,.0f} tok/s")
    if status.bubble is not None and not is_narrow:
        words.append(f"bubble {status.bubble:.1%} by estimate")
    words.append(f"{format_seconds(status.seconds_left)} left")
    bar = ProgressBar(total=1.0, completed=status.done_fraction)
    line.add_row(bar, literal("  ".join(words)))
    yield line
    counts = Text(no_wrap=True, overflow="ellipsis")
    for kind, count in status.counts.items():
        counts.append(f"{', ' if counts else ''}{count} {kind}", _STYLES.get(kind, ""))
    yield counts


def _job_lines(run: RunStatus, jobs: Sequence[JobStatus], is_narrow: bool) -> Table:
    rows = [_cells(job, run.status_of(job), is_narrow) for job in jobs]
    lines = Table.grid(padding=(0, 1), expand=True)
    lines.add_column(no_wrap=True, overflow="ellipsis", ratio=2)
    if not is_narrow:
        lines.add_column(ratio=3)
    for texts in zip(*rows, strict=True):
        width = max(map(len, texts))  # names are cut short before numbers are
        lines.add_column(no_wrap=True, justify="right", min_width=width)
    for job, texts in zip(jobs, rows, strict=True):
        bar = ProgressBar(total=job.num_steps, completed=job.progress.step)
        cells: list[RenderableType] = [literal(job.name), *map(literal, texts)]
        if not is_narrow:
            cells.insert(1, bar)
        is_running = run.status_of(job) == "running"
        lines.add_row(*cells, style="" if is_running else "dim")
    return lines


def _cells(job: JobStatus, status: str, is_narrow: bool) -> tuple[str, ...]:
    """Returns steps, training loss and best held-out loss; no words if narrow."""
    p = job.progress
    words = ("", "") if is_narrow else ("loss ", "eval ")
    loss, best = map(_format_loss, words, (p.last_loss, p.best_eval))
    state = loss if status == "running" else status
    return f"{p.step}/{job.num_steps}", state, best


def _format_loss(name: str, loss: float | None) -> str:
    return "" if loss is None else f"{name}{loss:.3f}"


def print_status(saved: SavedStatus, owner: Owner | None, console: Console) -> None:
    """Prints the state of a run: one line per job.

    Args:
        saved: The state, as `SavedStatus.seen` returns it.
        owner: Process that trains the run; None: there is none.
        console: Console to print to.
    """
    run = saved.run
    if owner is not None:
        show(console, f"trained by {owner}", soft_wrap=True)
        parts = [f"{run.done_fraction:.0%} done"]
        if run.tokens_per_second is not None:
            parts.append(f"{run.tokens_per_second:,.0f} tok/s")
        show(console, ", ".join([*parts, f"{format_seconds(run.seconds_left)} left"]))
    else:
        is_over = all(job.progress.is_over for job in run.jobs)
        rest = "; `jaxlora train --resume` continues what is left"
        show(console, "not running" + ("" if is_over else rest), soft_wrap=True)
    counts = ", ".join(f"{count} {status}" for status, count in run.counts.items())
    show(console, f"as of {saved.written}: round {run.round}, {counts}")
    table = plain_table()
    for column in ("job", "status"):
        table.add_column(column, no_wrap=True)
    for column in ("slot", "rank", "steps", "loss", "best held-out"):
        table.add_column(column, justify="right", no_wrap=True)
    for job in in_display_order(run.jobs):
        p = job.progress
        cells = (
            job.name,
            run.status_of(job),
            "-" if p.slot is None else str(p.slot),
            str(job.rank),
            f"{p.step}/{job.num_steps}",
            "-" if p.last_loss is None else f"{p.last_loss:.3f}",
            "-" if p.best_eval is None else f"{p.best_eval:.3f} at {p.best_step}",
        )
        table.add_row(*map(literal, cells))
    show(console, table)


def format_seconds(seconds: float | None) -> str:
    """Formats a duration as hours, minutes and seconds; `?` if it is unknown."""
    if seconds is None:
        return "?"
    return str(datetime.timedelta(seconds=round(seconds)))

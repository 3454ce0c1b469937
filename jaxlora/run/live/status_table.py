"""Prints the state of a run: one line per job."""

import rich.box
from rich.console import Console
from rich.table import Table

from jaxlora.common.console import literal, show
from jaxlora.run.job_progress import JobStatus
from jaxlora.run.live.status_file import SavedStatus
from jaxlora.run.lock import Owner
from jaxlora.run.status import RunStatus
from jaxlora.run.status_view import format_seconds, in_display_order


def print_status(saved: SavedStatus, owner: Owner | None, console: Console) -> None:
    """Prints the state of a run.

    Args:
        saved: The state, as `SavedStatus.seen` returns it.
        owner: Process that trains the run; None: there is none.
        console: Console to print to.
    """
    run = saved.run
    if owner is not None:
        show(console, f"trained by {owner}", soft_wrap=True)
        show(console, _speed(run))
    else:
        is_over = all(job.progress.is_over for job in run.jobs)
        rest = "; `jaxlora train --resume` continues what is left"
        show(console, "not running" + ("" if is_over else rest), soft_wrap=True)
    show(console, f"as of {saved.written}: round {run.round}, {_counts(run)}")
    show(console, _table(run))


def _speed(run: RunStatus) -> str:
    speed = run.tokens_per_second
    parts = [f"{run.done_fraction:.0%} done"]
    if speed is not None:
        parts.append(f"{speed:,.0f} tok/s")
    parts.append(f"{format_seconds(run.seconds_left)} left")
    return ", ".join(parts)


def _counts(run: RunStatus) -> str:
    return ", ".join(f"{count} {status}" for status, count in run.counts.items())


def _table(run: RunStatus) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("job", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for column in ("slot", "rank", "steps", "loss", "best held-out"):
        table.add_column(column, justify="right", no_wrap=True)
    for job in in_display_order(run.jobs):
        table.add_row(*map(literal, _cells(job, run.status_of(job))))
    return table


def _cells(job: JobStatus, status: str) -> tuple[str, ...]:
    p = job.progress
    best = "-" if p.best_eval is None else f"{p.best_eval:.3f} at {p.best_step}"
    return (
        job.name,
        status,
        "-" if p.slot is None else str(p.slot),
        str(job.rank),
        f"{p.step}/{job.num_steps}",
        "-" if p.last_loss is None else f"{p.last_loss:.3f}",
        best,
    )

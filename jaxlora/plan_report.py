"""Prints the plan of a run, and draws it."""

import os
import pathlib

import rich.box
from rich.console import Console
from rich.table import Table

from jaxlora.console import literal, show
from jaxlora.errors import ConfigError
from jaxlora.memory.device import format_bytes
from jaxlora.plan import RunPlan
from jaxlora.scheduler import Plan, picture
from jaxlora.scheduler.timeline import Timeline

_SHOWN_PARTS = 20
_DRAWN_MICROBATCHES = 60


def print_plan(planned: RunPlan, console: Console) -> None:
    """Prints the jobs, the windows and the totals of the run."""
    show(console, _jobs_table(planned))
    show(console, _parts_table(planned))
    hidden = len(planned.parts) - _SHOWN_PARTS
    if hidden > 0:
        show(console, f"... and {hidden} more; the totals count all.")
    show(console, _totals_table(planned))


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _jobs_table(planned: RunPlan) -> Table:
    table = _table("jobs", "job", "number", "samples", "longest", "steps", "tokens")
    for number, job in enumerate(planned.jobs):
        lengths = job.train_data.lengths
        tokens = sum(sum(job.lengths(step)) for step in range(job.num_steps))
        row = (number, len(lengths), lengths.max(), job.num_steps, tokens)
        table.add_row(literal(job.job.name), *(f"{n:,}" for n in row))
    return table


def _parts_table(planned: RunPlan) -> Table:
    num_lanes = planned.sizes.devices_per_stage
    one = num_lanes == 1
    table = _table(
        "windows" if one else f"windows; a tick is {num_lanes} microbatches",
        "number", "jobs", "steps", "microbatches" if one else "ticks", "fewest",
        "greedy", "fill", "padding",
    )  # fmt: skip
    for number, part in enumerate(planned.parts[:_SHOWN_PARTS]):
        batches = {(s.job, s.batch) for s in part.samples}
        jobs = {job for job, _ in batches}
        fill = part.schedule.fill
        table.add_row(
            str(number),
            _numbers(jobs),
            str(len(batches)),
            str(len(part.schedule.microbatches) // num_lanes),
            str(part.fewest),
            str(len(part.greedy.microbatches) // num_lanes),
            f"{fill:.1%}",
            f"{1 - fill:.1%}",
        )
    return table


def _numbers(jobs: set[int]) -> str:
    """Formats job numbers compactly: 0-3,7."""
    ranges: list[list[int]] = []
    for job in sorted(jobs):
        if ranges and job == ranges[-1][1] + 1:
            ranges[-1][1] = job
        else:
            ranges.append([job, job])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in ranges)


def _totals_table(planned: RunPlan) -> Table:
    num_devices = planned.sizes.num_devices
    where = "1 device" if num_devices == 1 else f"mesh {planned.sizes}"
    table = _table(f"in all, simulated on {where}", "", "plan", "greedy")
    both = planned.whole, planned.greedy

    def row(name: str, values) -> None:
        table.add_row(name, *values)

    row("microbatches", (f"{_num_real(p):,}" for p in both))
    row("no-ops", (f"{len(p.schedule.microbatches) - _num_real(p):,}" for p in both))
    fills = [planned.num_tokens / _num_tokens(p) for p in both]
    row("fill", (f"{fill:.1%}" for fill in fills))
    row("padding", (f"{1 - fill:.1%}" for fill in fills))
    row(
        "time, in tokens of one device", (f"{p.simulation.makespan:,.0f}" for p in both)
    )
    row("bubble", (f"{p.simulation.bubble:.1%}" for p in both))
    row("over the lower bound, at most", (f"{p.gap:.1%}" for p in both))
    speed = planned.greedy.simulation.makespan / planned.whole.simulation.makespan
    row("speed against greedy", (f"{speed:.3f}x", "1x"))
    row("devices at work on real tokens", (f"{planned.busy:.1%}", ""))
    base = planned.base_format
    name = "frozen weights" if base is None else f"frozen weights, {base.name}"
    row(name, (format_bytes(planned.base_bytes), ""))
    return table


def _num_real(planned: Plan) -> int:
    return sum(bool(m) for m in planned.schedule.microbatches)


def _num_tokens(planned: Plan) -> int:
    return _num_real(planned) * planned.schedule.limits.capacity


def draw_plan(planned: RunPlan, path: str | os.PathLike) -> int:
    """Writes a Gantt picture of the first microbatches; returns how many are in it.

    Raises:
        ConfigError: The suffix is no kind of picture.
    """
    kinds = (".png", ".svg", ".pdf")
    if pathlib.Path(path).suffix not in kinds:
        raise ConfigError(f"{path}: a picture ends in one of {', '.join(kinds)}.")
    whole = planned.whole
    drawn = min(_DRAWN_MICROBATCHES, len(whole.schedule.microbatches))
    until = float(whole.simulation.backward_end[:, :drawn].max())
    timeline = Timeline.simulated(whole.simulation)
    picture.draw(whole.schedule, {"simulated": timeline}, path, until=until)
    return drawn

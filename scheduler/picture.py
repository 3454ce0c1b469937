"""Draws bars over time: Gantt charts of schedules, and of plans."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.scheduler.lanes import Tick, ticks_of
from jaxlora.scheduler.timeline import Timeline
from jaxlora.scheduler.types import Schedule, tokens_by_job

_OPACITY = {"F": 0.45, "B": 1.0, "step": 1.0}
_STEP_COLOR = "black"
IDLE_COLOR = "0.85"
_MAX_COLORS = 20


def draw(
    schedule: Schedule,
    timelines: Mapping[str, Timeline],
    path: str | os.PathLike,
    *,
    num_lanes: int = 1,
    until: float | None = None,
    names: Mapping[int, str] | None = None,
) -> None:
    """Writes a Gantt chart of the stages over time.

    Each timeline has a panel, one below the other, which begins at its first pass. All
    of them have the same scale, so a measured timeline can be compared with a simulated
    one if both are in the same unit.

    Each stage has one row, and each pass is a bar: pale for a forward pass, saturated
    for a backward pass, black for an optimizer step. The bar of a pass is split into
    jobs in proportion to their tokens. Grey areas are bubbles.

    Args:
        schedule: The schedule that the timelines are of.
        timelines: The timelines, by their titles.
        path: Image file to write. Its suffix selects the format (png, svg, pdf).
        num_lanes: Number of microbatches in a tick.
        until: Time after the first pass at which the chart ends; None draws the whole
            run.
        names: Names of the jobs by number; None: they are `job 0`, `job 1`, ...
    """
    ticks = ticks_of(schedule.microbatches, num_lanes)
    longest = max(t.makespan for t in timelines.values())
    end = longest if until is None else min(until, longest)
    jobs = sorted({s.owner for m in schedule.microbatches for s in m})
    colors = job_colors(jobs)
    panels = [
        Panel(
            title=f"{title}: {timeline.bubble:.1%} bubble, makespan "
            f"{timeline.makespan:.4g}",
            bars=_bars(timeline, ticks, colors, end),
            rows=[f"stage {stage}" for stage in range(timeline.num_stages)],
            height=1.2 + 0.7 * timeline.num_stages,
        )
        for title, timeline in timelines.items()
    ]
    legend: dict[str, Any] = {}
    # With more jobs than colors, the legend would be ambiguous.
    if 0 < len(jobs) <= _MAX_COLORS:
        if names is None:
            names = {job: f"job {job}" for job in jobs}
        legend = {names[job]: colors[job] for job in jobs} | {"bubble": IDLE_COLOR}
    save_panels(panels, path, end=end, unit="time", legend=legend)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar: what one job does on some rows.

    Attributes:
        left, right: Start and end.
        low, high: Rows between which it is; row 0 is from -0.5 to 0.5.
        color: Color, with its opacity if it is not 1.
    """

    left: float
    right: float
    low: float
    high: float
    color: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """Bars over time, in rows.

    Attributes:
        title: Title.
        bars: The bars.
        rows: Names of the rows; or their number, if they are GPUs.
        height: Height in inches.
    """

    title: str
    bars: Sequence[Bar]
    rows: Sequence[str] | int
    height: float


def save_panels(
    panels: Sequence[Panel],
    path: str | os.PathLike,
    *,
    end: float,
    unit: str,
    legend: Mapping[str, Any],
) -> None:
    """Writes panels of bars, one below the other, on one scale.

    Args:
        panels: The panels.
        path: Image file to write. Its suffix selects the format (png, svg, pdf).
        end: Time at which they end.
        unit: Label of the axis of time.
        legend: Colors by their names; none: without a legend.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [panel.height for panel in panels]
    figure = Figure(figsize=(14, sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        corners = [
            [(b.left, b.low), (b.right, b.low), (b.right, b.high), (b.left, b.high)]
            for b in panel.bars
        ]
        # A thin edge separates adjacent bars of the same job.
        axes.add_collection(
            PolyCollection(
                corners,
                facecolors=[bar.color for bar in panel.bars],
                edgecolors="white",
                linewidths=0.3,
            )
        )
        axes.set_facecolor(IDLE_COLOR)
        axes.set_xlim(0, max(end, 1e-12))
        if isinstance(panel.rows, int):
            num_rows = panel.rows
            axes.set_ylabel("GPU")
        else:
            num_rows = len(panel.rows)
            axes.set_yticks(range(num_rows), panel.rows)
        axes.set_ylim(num_rows - 0.5, -0.5)
        axes.set_title(panel.title)
    all_axes[-1].set_xlabel(unit)
    if legend:
        handles = [Patch(color=color, label=name) for name, color in legend.items()]
        figure.legend(handles=handles, loc="outside right upper")
    figure.savefig(path, dpi=150)


def job_colors(jobs: Sequence[int]) -> dict[int, Any]:
    """Returns a color for each job; they repeat beyond `_MAX_COLORS` jobs."""
    from matplotlib import colormaps

    if len(jobs) <= 10:
        return {job: f"C{i}" for i, job in enumerate(jobs)}
    palette = colormaps["tab20"]
    return {job: palette(i % _MAX_COLORS) for i, job in enumerate(jobs)}


def _bars(
    timeline: Timeline, ticks: list[Tick], colors: dict[int, Any], end: float
) -> list[Bar]:
    """Returns all bars that start before `end`."""
    bars = []
    parts_of = [tokens_by_job(s for m in tick for s in m) for tick in ticks]
    for p in timeline.passes:
        left, right = p.start - timeline.start, p.end - timeline.start
        if left >= end:
            continue
        parts = {colors[job]: n for job, n in parts_of[p.tick].items()}
        if p.kind == "step":
            parts = {_STEP_COLOR: 1}
        total = sum(parts.values())
        low = p.stage - 0.42
        for color, tokens in parts.items():
            high = low + 0.84 * tokens / total
            face = color, _OPACITY[p.kind]
            bars.append(Bar(left=left, right=right, low=low, high=high, color=face))
            low = high
    return bars

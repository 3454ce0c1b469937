"""Draws timelines of a schedule as a Gantt chart."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.scheduler.lanes import Tick, ticks_of
from jaxlora.scheduler.timeline import Timeline
from jaxlora.scheduler.types import Schedule, tokens_by_job

_OPACITY = {"F": 0.45, "B": 1.0, "step": 1.0}
_STEP_COLOR = "black"
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
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ticks = ticks_of(schedule.microbatches, num_lanes)
    longest = max(t.makespan for t in timelines.values())
    end = longest if until is None else min(until, longest)
    jobs = sorted({s.owner for m in schedule.microbatches for s in m})
    colors = job_colors(jobs)
    height = sum(1.2 + 0.7 * t.num_stages for t in timelines.values())
    figure = Figure(figsize=(14, height), layout="constrained")
    panels = figure.subplots(len(timelines), squeeze=False)[:, 0]
    for axes, (title, timeline) in zip(panels, timelines.items(), strict=True):
        _draw_panel(axes, timeline, ticks, colors, end)
        axes.set_title(
            f"{title}: {timeline.bubble:.1%} bubble, makespan {timeline.makespan:.4g}"
        )
    panels[-1].set_xlabel("time")
    # With more jobs than colors, the legend would be ambiguous.
    if 0 < len(jobs) <= _MAX_COLORS:
        if names is None:
            names = {job: f"job {job}" for job in jobs}
        handles = [Patch(color=colors[j], label=names[j]) for j in jobs]
        handles.append(Patch(color="0.85", label="bubble"))
        figure.legend(handles=handles, loc="outside right upper")
    figure.savefig(path, dpi=150)


def job_colors(jobs: Sequence[int]) -> dict[int, Any]:
    """Returns a color for each job; they repeat beyond `_MAX_COLORS` jobs."""
    from matplotlib import colormaps

    if len(jobs) <= 10:
        return {job: f"C{i}" for i, job in enumerate(jobs)}
    palette = colormaps["tab20"]
    return {job: palette(i % _MAX_COLORS) for i, job in enumerate(jobs)}


def _draw_panel(
    axes, timeline: Timeline, ticks: list[Tick], colors: dict[int, Any], end: float
) -> None:
    from matplotlib.collections import PolyCollection

    bars, faces = _bars(timeline, ticks, colors, end)
    # A thin edge separates adjacent passes of the same job.
    axes.add_collection(
        PolyCollection(bars, facecolors=faces, edgecolors="white", linewidths=0.3)
    )
    axes.set_facecolor("0.85")
    axes.set_xlim(0, max(end, 1e-12))
    axes.set_ylim(timeline.num_stages - 0.5, -0.5)
    stages = range(timeline.num_stages)
    axes.set_yticks(stages, [f"stage {s}" for s in stages])


def _bars(
    timeline: Timeline, ticks: list[Tick], colors: dict[int, Any], end: float
) -> tuple[list[list[tuple[float, float]]], list[tuple[Any, float]]]:
    """Returns the corners and (color, opacity) of all bars that start before `end`."""
    bars, faces = [], []
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
            bars.append([(left, low), (right, low), (right, high), (left, high)])
            faces.append((color, _OPACITY[p.kind]))
            low = high
    return bars, faces

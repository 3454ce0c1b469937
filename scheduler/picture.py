"""Draws bars over time: Gantt charts of schedules, and of plans."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxlora.scheduler.lanes import Tick, ticks_of
from jaxlora.scheduler.simulate import Simulation
from jaxlora.scheduler.types import Schedule, tokens_by_job

_FORWARD_OPACITY = 0.45
IDLE_COLOR = "0.85"
_MAX_COLORS = 20


def draw(
    schedule: Schedule,
    simulation: Simulation,
    path: str | os.PathLike,
    *,
    num_lanes: int = 1,
    until: float | None = None,
    names: Mapping[int, str] | None = None,
) -> None:
    """Writes a Gantt chart of the stages over time.

    Each stage has one row, and each pass is a bar: pale for a forward pass, saturated
    for a backward pass. The bar of a pass is split into jobs in proportion to their
    tokens. Grey areas are bubbles.

    Args:
        schedule: The schedule.
        simulation: Its simulation.
        path: Image file to write. Its suffix selects the format (png, svg, pdf).
        num_lanes: Number of microbatches in a tick.
        until: Time at which the chart ends; None draws the whole run.
        names: Names of the jobs by number; None: they are `job 0`, `job 1`, ...
    """
    ticks, end = ticks_of(schedule.microbatches, num_lanes), simulation.makespan
    end = end if until is None else min(until, end)
    jobs = sorted({s.owner for m in schedule.microbatches for s in m})
    colors, num_stages = job_colors(jobs), len(simulation.forward_start)
    panel = Panel(
        title=f"simulated: {simulation.bubble:.1%} bubble, makespan "
        f"{simulation.makespan:.4g}",
        bars=_bars(simulation, ticks, colors, end),
        rows=[f"stage {stage}" for stage in range(num_stages)],
        height=1.2 + 0.7 * num_stages,
    )
    legend: dict[str, Any] = {}
    # With more jobs than colors, the legend would be ambiguous.
    if 0 < len(jobs) <= _MAX_COLORS:
        if names is None:
            names = {job: f"job {job}" for job in jobs}
        legend = {names[job]: colors[job] for job in jobs} | {"bubble": IDLE_COLOR}
    save_panels([panel], path, end=end, unit="time", legend=legend)


class Bar(NamedTuple):
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
    """Writes panels of bars, one below the other, on one scale, which ends at `end`.

    The suffix of the path selects the format (png, svg, pdf). The legend has colors by
    their names.
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
    simulation: Simulation, ticks: list[Tick], colors: dict[int, Any], end: float
) -> list[Bar]:
    """Returns the bars of all passes that start before `end`."""
    bars = []
    parts_of = [tokens_by_job(s for m in tick for s in m) for tick in ticks]
    for starts, ends, opacity in (
        (simulation.forward_start, simulation.forward_end, _FORWARD_OPACITY),
        (simulation.backward_start, simulation.backward_end, 1.0),
    ):
        for stage, tick in np.argwhere((starts < ends) & (starts < end)).tolist():
            total, low = sum(parts_of[tick].values()), stage - 0.42
            for job, tokens in parts_of[tick].items():
                high = low + 0.84 * tokens / total
                left, right = float(starts[stage, tick]), float(ends[stage, tick])
                bars.append(Bar(left, right, low, high, (colors[job], opacity)))
                low = high
    return bars

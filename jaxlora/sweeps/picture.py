"""Draws a sweep: its curves, parallel coordinates, and the importance of settings."""

import pathlib
from typing import Any

from jaxlora.sweeps.axes import parallel_axes
from jaxlora.sweeps.importance import importance
from jaxlora.sweeps.ranking import SweepReport
from jaxlora.train.report.plot import write_png

_NUM_NAMED = 8  # configurations in colors; the others are grey


def draw_sweep(report: SweepReport, picture: pathlib.Path) -> None:
    """Writes the picture.

    Args:
        report: The sweep.
        picture: PNG file to write.

    Raises:
        StorageError: It cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    grid = figure.add_gridspec(2, 3)
    _draw_curves(figure.add_subplot(grid[0, :2]), report)
    _draw_importance(figure.add_subplot(grid[0, 2]), report)
    _draw_parallel(figure.add_subplot(grid[1, :]), report)
    write_png(figure, picture)


def _style(place: int) -> dict[str, Any]:
    if place < _NUM_NAMED:
        return {"color": f"C{place}", "linewidth": 1.6, "zorder": 3}
    return {"color": "0.75", "linewidth": 0.7, "zorder": 2}


def _plain(text: str) -> str:
    """Returns a text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")


def _draw_curves(axes: Any, report: SweepReport) -> None:
    for place, trial in reversed(list(enumerate(report.trials))):
        name = trial.settings.name
        if not (points := report.curves.get(name)):
            continue
        shares = [step / trial.num_steps for step, _ in points]
        losses = [loss for _, loss in points]
        label = _plain(name) if place < _NUM_NAMED else None
        axes.plot(
            shares, losses, marker="o", markersize=2, label=label, **_style(place)
        )
    axes.set_xlabel("share of the configuration's own steps")
    unit = ", nats per target token" if report.metric.is_loss else ""
    axes.set_ylabel(_plain(report.metric_name + unit))
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(handles[::-1], labels[::-1], fontsize="x-small")


def _draw_importance(axes: Any, report: SweepReport) -> None:
    found = importance(report.varied, report.costs)
    names = [_plain(name) for name in reversed(found)]
    axes.barh(names, list(found.values())[::-1], color="C0")
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the variance of places, by each alone")


def _draw_parallel(axes: Any, report: SweepReport) -> None:
    columns = parallel_axes(report)
    for place in reversed(range(len(report.trials))):
        heights = [column.places[place] for column in columns]
        axes.plot(range(len(columns)), heights, **_style(place))
    for x, column in enumerate(columns):
        axes.axvline(x, color="0.5", linewidth=0.8, zorder=1)
        for height, text in column.ticks:
            axes.text(x + 0.01, height, _plain(text), fontsize="x-small", zorder=4)
    axes.set_xticks(range(len(columns)), [_plain(c.name) for c in columns])
    axes.set_yticks([])
    axes.set_ylim(-0.05, 1.05)

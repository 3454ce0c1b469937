"""Draws plans of sweeps as Gantt charts."""

import os
from collections.abc import Mapping

from jaxlora.scheduler.picture import job_colors
from jaxlora.scheduler.sweep.problem import SweepPlan

_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def draw_sweep(plans: Mapping[str, SweepPlan], path: str | os.PathLike) -> None:
    """Writes a Gantt chart of plans, one below the other, on one scale.

    Each GPU has a row. A group covers the rows of its GPUs and is split into its slots,
    in which each configuration is a bar; its color is its rank. Grey areas are idle.

    Args:
        plans: The plans by their titles.
        path: Image file to write. Its suffix selects the format (png, svg, pdf).
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    longest = max(plan.makespan for plan in plans.values())
    unit, length = next((u for u in _UNITS if longest >= 2 * u[1]), _UNITS[-1])
    configurations = [c for p in plans.values() for c in p.sweep.configurations]
    colors = job_colors(sorted({c.rank for c in configurations}))
    rows = [min(plan.sweep.num_gpus, 64) for plan in plans.values()]
    figure = Figure(
        figsize=(14, sum(1.2 + 0.35 * n for n in rows)), layout="constrained"
    )
    panels = figure.subplots(
        len(plans), squeeze=False, height_ratios=[3 + n for n in rows]
    )[:, 0]
    for axes, (title, plan) in zip(panels, plans.items(), strict=True):
        bars, faces = _bars(plan, length, colors)
        axes.add_collection(
            PolyCollection(bars, facecolors=faces, edgecolors="white", linewidths=0.3)
        )
        axes.set_facecolor("0.85")
        axes.set_xlim(0, longest / length)
        axes.set_ylim(plan.sweep.num_gpus - 0.5, -0.5)
        axes.set_ylabel("GPU")
        axes.set_title(
            f"{title}: {plan.makespan / length:.4g} {unit}, {len(plan.groups)} groups"
        )
    panels[-1].set_xlabel(unit)
    handles = [Patch(color=c, label=f"rank {rank}") for rank, c in colors.items()]
    handles.append(Patch(color="0.85", label="idle"))
    figure.legend(handles=handles, loc="outside right upper")
    figure.savefig(path, dpi=150)


def _bars(plan: SweepPlan, length: float, colors: Mapping) -> tuple[list, list]:
    """Returns corners and colors of all bars, with times in units of `length`."""
    bars, faces = [], []
    for group in plan.groups:
        # GPUs of a group need not be neighbors: it has a part of each row.
        for gpu in group.gpus:
            for run in group.runs:
                low = gpu - 0.45 + 0.9 * run.slot / group.num_slots
                high = low + 0.9 / group.num_slots
                left, right = run.start / length, run.end / length
                bars.append([(left, low), (right, low), (right, high), (left, high)])
                faces.append(colors[run.configuration.rank])
    return bars, faces

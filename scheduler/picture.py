"""Draws a simulated schedule as a Gantt chart."""

import os

from jaxlora.scheduler.simulate import Simulation
from jaxlora.scheduler.types import Schedule, tokens_by_job


def draw(
    schedule: Schedule,
    simulation: Simulation,
    path: str | os.PathLike,
    *,
    until: float | None = None,
) -> None:
    """Writes a Gantt chart of the stages over time.

    Each stage has one row, and each pass is a bar: pale for a forward pass, saturated
    for a backward pass. A bar is split into jobs in proportion to their tokens. Grey
    areas are bubbles.

    Args:
        schedule: The schedule.
        simulation: Its simulation.
        path: Image file to write. Its suffix selects the format (png, svg, pdf).
        until: Time at which the chart ends; None draws the whole run.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    end = simulation.makespan if until is None else min(until, simulation.makespan)
    num_stages = simulation.forward_start.shape[0]
    jobs = sorted({s.job for m in schedule.microbatches for s in m})
    colours = {job: f"C{i % 10}" for i, job in enumerate(jobs)}
    figure = Figure(figsize=(14, 1.2 + 0.7 * num_stages), layout="constrained")
    axes = figure.subplots()
    bars, faces = _bars(schedule, simulation, end, colours)
    # A thin edge separates adjacent passes of the same job.
    axes.add_collection(
        PolyCollection(bars, facecolors=faces, edgecolors="white", linewidths=0.3)
    )
    axes.set_facecolor("0.85")
    axes.set_xlim(0, max(end, 1e-12))
    axes.set_ylim(num_stages - 0.5, -0.5)
    axes.set_yticks(range(num_stages), [f"stage {s}" for s in range(num_stages)])
    axes.set_xlabel("time")
    axes.set_title(
        f"{simulation.bubble:.1%} bubble, makespan {simulation.makespan:.4g}"
    )
    # With more jobs than colors, the legend would be ambiguous.
    if 0 < len(jobs) <= 10:
        handles = [Patch(color=colours[j], label=f"job {j}") for j in jobs]
        handles.append(Patch(color="0.85", label="bubble"))
        figure.legend(handles=handles, loc="outside right upper")
    figure.savefig(path, dpi=150)


def _bars(
    schedule: Schedule, simulation: Simulation, end: float, colours: dict[int, str]
) -> tuple[list[list[tuple[float, float]]], list[tuple[str, float]]]:
    """Returns the corners and (color, opacity) of all bars that start before `end`."""
    bars, faces = [], []
    passes = (
        (simulation.forward_start, simulation.forward_end, 0.45),
        (simulation.backward_start, simulation.backward_end, 1.0),
    )
    for i, microbatch in enumerate(schedule.microbatches):
        parts = tokens_by_job(microbatch)
        total = sum(parts.values())
        for starts, ends, opacity in passes:
            for stage, (left, right) in enumerate(
                zip(starts[:, i].tolist(), ends[:, i].tolist(), strict=True)
            ):
                low = stage - 0.42
                for job, tokens in parts.items() if left < end else ():
                    high = low + 0.84 * tokens / max(1, total)
                    bars.append(
                        [(left, low), (right, low), (right, high), (left, high)]
                    )
                    faces.append((colours[job], opacity))
                    low = high
    return bars, faces

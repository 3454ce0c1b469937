"""What a schedule looks like: a Gantt picture of stages and time, and a table."""

import os

from jaxlora.scheduler.simulate import Simulation
from jaxlora.scheduler.types import Schedule, padded_tokens, tokens_by_job

HEADER = ("microbatch", "start", "end", "tokens", "fill", "jobs")


def table(schedule: Schedule, simulation: Simulation) -> list[tuple[str, ...]]:
    """Rows of text, one a microbatch, in the order of `HEADER`.

    A job is written as `job.batch x samples`. Start is that of the forward on stage 0,
    and end that of the backward there.
    """
    rows: list[tuple[str, ...]] = []
    for i, microbatch in enumerate(schedule.microbatches):
        tokens = padded_tokens(microbatch, schedule.limits)
        counts: dict[tuple[int, int], int] = {}
        for s in microbatch:
            counts[s.job, s.batch] = counts.get((s.job, s.batch), 0) + 1
        jobs = ", ".join(f"{j}.{b} x {n}" for (j, b), n in counts.items())
        times = simulation.forward_start[0, i], simulation.backward_end[0, i]
        fill = f"{tokens / schedule.limits.capacity:.0%}"
        start, end = (f"{t:.6g}" for t in times)
        rows.append((str(i), start, end, str(tokens), fill, jobs or "no-op"))
    return rows


def draw(
    schedule: Schedule,
    simulation: Simulation,
    path: str | os.PathLike,
    *,
    until: float | None = None,
) -> None:
    """Writes a Gantt picture; the file's suffix says which kind (png, svg, pdf).

    A row a stage. A pass is a bar, cut into its jobs by their tokens: pale forward,
    full backward. What stays grey is bubble.

    Args:
        schedule: What ran.
        simulation: Its run.
        path: Where to.
        until: Draw the run to this time; by default all of it.
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
    # A thin edge keeps apart the passes of one job that touch.
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
    # More jobs than colours would only say that colours repeat.
    if 0 < len(jobs) <= 10:
        handles = [Patch(color=colours[j], label=f"job {j}") for j in jobs]
        handles.append(Patch(color="0.85", label="bubble"))
        figure.legend(handles=handles, loc="outside right upper")
    figure.savefig(path, dpi=150)


def _bars(
    schedule: Schedule, simulation: Simulation, end: float, colours: dict[int, str]
) -> tuple[list[list[tuple[float, float]]], list[tuple[str, float]]]:
    """Corners and (colour, opacity) of all bars that begin before `end`."""
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

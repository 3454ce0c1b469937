"""Text tables of deployments, and Gantt charts of steps on their replicas."""

import os
from collections.abc import Mapping

import numpy as np

from jaxlora.scheduler.picture import job_colors
from jaxlora.scheduler.replicas.deploy import PlannedDeployment
from jaxlora.scheduler.replicas.simulate import Part, SimulatedSteps
from jaxlora.scheduler.tables import align, format_seconds


def step_table(
    planned: PlannedDeployment, others: Mapping[str, float], num_gpus: int
) -> str:
    """Formats a step of a deployment beside other ways to do the same as a text table.

    Args:
        planned: The deployment.
        others: Seconds of a step of every job, by what takes them.
        num_gpus: Number of GPUs.
    """
    head = ["", "a step", "GPU-seconds", "saved"]
    lines = []
    for name, seconds in {"this deployment": planned.seconds, **others}.items():
        saved = 1 - planned.seconds / seconds
        line = [name, format_seconds(seconds), f"{num_gpus * seconds:,.1f}"]
        lines.append([*line, f"{saved:.1%}" if seconds != planned.seconds else ""])
    bound = format_seconds(planned.bound)
    over = f"the deployment is {planned.gap:.3f} times it"
    return align(head, lines) + f"\nlower bound of any deployment: {bound}; {over}"


def replica_table(simulated: SimulatedSteps) -> str:
    """Formats the kinds of a deployment, and how long their replicas wait."""
    deployment = simulated.deployment
    head = ["replicas", "count", "GPUs each", "longest sample", "tokens/s", "idle"]
    lines = []
    for i, (kind, count) in enumerate(
        zip(deployment.kinds, deployment.counts, strict=True)
    ):
        idle = simulated.idle[deployment.kind_of == i]
        speed = 1 / kind.cost.per_token
        lines.append(
            [
                str(kind),
                str(count),
                str(kind.num_gpus),
                f"{kind.longest:,}",
                f"{speed:,.0f}",
                f"{float(np.mean(idle)):.1%}",
            ]
        )
    return align(head, lines)


_MAX_ROWS = 20


def draw_steps(
    simulated: Mapping[str, SimulatedSteps],
    path: str | os.PathLike,
    *,
    names: Mapping[int, str] | None = None,
    until: float | None = None,
) -> None:
    """Writes a Gantt chart of steps, one panel below the other, on one scale.

    A replica covers the rows of its GPUs, and each job's part of a step is a bar. Grey
    areas are idle.

    Args:
        simulated: The steps by their titles.
        path: Image file to write. Its suffix selects the format (png, svg, pdf).
        names: Names of the jobs by number; None: they are `job 0`, `job 1`, ...
        until: Seconds at which the chart ends; None: it has all steps.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    longest = max(one.seconds for one in simulated.values())
    end = longest if until is None else min(until, longest)
    jobs = sorted({part.job for one in simulated.values() for part in one.parts})
    colors = job_colors(jobs)
    rows = [one.deployment.num_gpus for one in simulated.values()]
    heights = [min(n, _MAX_ROWS) for n in rows]
    figure = Figure(
        figsize=(14, sum(1.2 + 0.25 * n for n in heights)), layout="constrained"
    )
    panels = figure.subplots(
        len(rows), squeeze=False, height_ratios=[3 + n for n in heights]
    )[:, 0]
    for axes, num_gpus, (title, one) in zip(
        panels, rows, simulated.items(), strict=True
    ):
        gpus = one.deployment.gpus
        bars = [_corners(part, gpus[part.replica]) for part in one.parts]
        faces = [colors[part.job] for part in one.parts]
        axes.add_collection(
            PolyCollection(bars, facecolors=faces, edgecolors="white", linewidths=0.3)
        )
        axes.set_facecolor("0.85")
        axes.set_xlim(0, end)
        axes.set_ylim(num_gpus - 0.5, -0.5)
        axes.set_ylabel("GPU")
        axes.set_title(f"{title}: {one.gpus_idle:.1%} of the GPUs' time is idle")
    panels[-1].set_xlabel("seconds")
    label = lambda job: f"job {job}" if names is None else names[job]
    handles = [Patch(color=colors[job], label=label(job)) for job in jobs]
    handles.append(Patch(color="0.85", label="idle"))
    figure.legend(handles=handles, loc="outside right upper")
    figure.savefig(path, dpi=150)


def _corners(part: Part, gpus: tuple[int, ...]) -> list[tuple[float, float]]:
    low, high = gpus[0] - 0.45, gpus[-1] + 0.45
    low_corners = [(part.start, low), (part.end, low)]
    return [*low_corners, (part.end, high), (part.start, high)]

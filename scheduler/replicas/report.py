"""Text tables of deployments, and Gantt charts of steps on their replicas."""

import os
from collections.abc import Mapping

import numpy as np

from jaxlora.scheduler.picture import IDLE_COLOR, Bar, Panel, job_colors, save_panels
from jaxlora.scheduler.replicas.deploy import PlannedDeployment
from jaxlora.scheduler.replicas.simulate import SimulatedSteps
from jaxlora.scheduler.tables import align, format_seconds


def step_table(
    planned: PlannedDeployment, others: Mapping[str, float], num_gpus: int
) -> str:
    """Formats a step beside the seconds of other ways to do it, as a text table."""
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
    longest = max(one.seconds for one in simulated.values())
    jobs = sorted({part.job for one in simulated.values() for part in one.parts})
    colors = job_colors(jobs)
    panels = [
        Panel(
            title=f"{title}: {one.gpus_idle:.1%} of the GPUs' time is idle",
            bars=_bars(one, colors),
            rows=one.deployment.num_gpus,
            height=1.2 + 0.25 * min(one.deployment.num_gpus, _MAX_ROWS),
        )
        for title, one in simulated.items()
    ]
    legend = {
        f"job {job}" if names is None else names[job]: color
        for job, color in colors.items()
    }
    end = longest if until is None else min(until, longest)
    save_panels(
        panels, path, end=end, unit="seconds", legend=legend | {"idle": IDLE_COLOR}
    )


def _bars(simulated: SimulatedSteps, colors: Mapping) -> list[Bar]:
    rows = [(own[0] - 0.45, own[-1] + 0.45) for own in simulated.deployment.gpus]
    return [
        Bar(part.start, part.end, *rows[part.replica], colors[part.job])
        for part in simulated.parts
    ]

"""Text tables of deployments."""

from collections.abc import Mapping

import numpy as np

from jaxlora.scheduler.replicas.deploy import PlannedDeployment
from jaxlora.scheduler.replicas.simulate import SimulatedSteps
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

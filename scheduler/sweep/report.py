"""Text tables of sweeps."""

from collections.abc import Mapping

from jaxlora.scheduler.sweep.planner import PlannedSweep
from jaxlora.scheduler.sweep.problem import Group, SweepPlan
from jaxlora.scheduler.tables import align, format_seconds


def comparison_table(
    planned: PlannedSweep,
    others: Mapping[str, SweepPlan],
    *,
    per_gpu_hour: float | None = None,
) -> str:
    """Formats a plan, other plans of the same sweep, and the bounds as a text table.

    Args:
        planned: The plan.
        others: Plans to compare it with, by their names.
        per_gpu_hour: Price of one GPU for an hour, in any currency; all GPUs are paid
            for until the end. None: without prices.
    """
    head = ["", "makespan", "over the plan", "GPU-hours", "groups"]
    lines = []
    for name, plan in {"this plan": planned.plan, **others}.items():
        over = plan.makespan / planned.plan.makespan
        line = [name, format_seconds(plan.makespan), f"{over:.2f}"]
        line += [f"{plan.gpu_hours:.2f}", str(len(plan.groups))]
        lines.append(line)
        if per_gpu_hour is not None:
            line.append(f"{plan.price(per_gpu_hour):.2f}")
    if per_gpu_hour is not None:
        head.append("price")
    for name, bound in (
        ("lower bound, groups keep their GPUs", planned.bound.fixed_groups),
        ("lower bound, any plan", planned.bound.any_plan),
    ):
        over = bound / planned.plan.makespan
        lines.append([name, format_seconds(bound), f"{over:.2f}"])
    return align(head, lines)


def group_table(plan: SweepPlan) -> str:
    """Formats the groups of a plan as a text table; equal ones share a line."""
    lines: dict[tuple[str, ...], list[Group]] = {}
    for group in plan.groups:
        ranks = sorted({run.configuration.rank for run in group.runs})
        shown = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        key = (
            str(group.degree),
            str(group.num_slots),
            str(group.slot_rank),
            shown,
            str(group.round_tokens),
        )
        lines.setdefault(key, []).append(group)
    head = ["groups", "GPUs each", "slots", "slot rank", "ranks", "tokens of a round"]
    head += ["configurations", "end"]
    rows = [
        [
            str(len(groups)),
            *key,
            str(sum(len(group.runs) for group in groups)),
            format_seconds(max(group.end for group in groups)),
        ]
        for key, groups in lines.items()
    ]
    return align(head, rows)

"""Text tables and Gantt charts of sweeps."""

import os
from collections.abc import Mapping

from jaxlora.scheduler.picture import IDLE_COLOR, Bar, Panel, job_colors, save_panels
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


_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def draw_sweep(plans: Mapping[str, SweepPlan], path: str | os.PathLike) -> None:
    """Writes a Gantt chart of plans, one below the other, on one scale.

    Each GPU has a row. A group covers the rows of its GPUs and is split into its slots,
    in which each configuration is a bar; its color is its rank. Grey areas are idle.

    Args:
        plans: The plans by their titles.
        path: Image file to write. Its suffix selects the format (png, svg, pdf).
    """
    longest = max(plan.makespan for plan in plans.values())
    unit, length = next((u for u in _UNITS if longest >= 2 * u[1]), _UNITS[-1])
    configurations = [c for p in plans.values() for c in p.sweep.configurations]
    colors = job_colors(sorted({c.rank for c in configurations}))
    panels = [
        Panel(
            title=f"{title}: {plan.makespan / length:.4g} {unit}, {len(plan.groups)} "
            "groups",
            bars=_bars(plan, length, colors),
            rows=plan.sweep.num_gpus,
            height=1.2 + 0.35 * min(plan.sweep.num_gpus, 64),
        )
        for title, plan in plans.items()
    ]
    legend = {f"rank {rank}": color for rank, color in colors.items()}
    legend["idle"] = IDLE_COLOR
    save_panels(panels, path, end=longest / length, unit=unit, legend=legend)


def _bars(plan: SweepPlan, length: float, colors: Mapping) -> list[Bar]:
    """Returns all bars, with times in units of `length`."""
    bars = []
    for group in plan.groups:
        # GPUs of a group need not be neighbors: it has a part of each row.
        for gpu in group.gpus:
            for run in group.runs:
                low = gpu - 0.45 + 0.9 * run.slot / group.num_slots
                high = low + 0.9 / group.num_slots
                left, right = run.start / length, run.end / length
                bars.append(Bar(left, right, low, high, colors[run.configuration.rank]))
    return bars

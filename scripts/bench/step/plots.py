"""Plots of the step benchmark."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Row = Mapping[str, Any]


def _name(row: Row) -> str:
    adapters = f", {row['adapters']} adapters" if row["adapters"] > 1 else ""
    return f"{row['model']}: {row['row']}{adapters}"


def plot_steps(rows: Sequence[Row], path: Path) -> None:
    """Draws bars of speed and of memory, unless all rows were skipped."""
    rows = [row for row in rows if "skipped" not in row][::-1]
    if not rows:
        return
    figure = Figure(figsize=(10, 0.35 * len(rows) + 1.5), layout="tight")
    speed, memory = figure.subplots(ncols=2, sharey=True)
    names = [_name(row) for row in rows]
    speed.barh(names, [row["tokens_per_second"] for row in rows])
    speed.set_xlabel("tokens/s")
    memory.barh(names, [row["peak_gib"] or row["program_gib"] or 0 for row in rows])
    memory.set_xlabel("peak memory, GiB")
    figure.savefig(path, dpi=150)


def plot_parts(parts: Sequence[Row], path: Path) -> None:
    """Draws a bar for each row, made of the times of its parts."""
    names = list(dict.fromkeys(_name(part) for part in parts))[::-1]
    kinds = list(dict.fromkeys(part["part"] for part in parts))
    figure = Figure(figsize=(10, 0.4 * len(names) + 2), layout="tight")
    axes = figure.subplots()
    left = [0.0] * len(names)
    for kind in kinds:
        time = {_name(p): p["ms"] for p in parts if p["part"] == kind}
        widths = [time.get(name, 0.0) for name in names]
        axes.barh(names, widths, left=left, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("ms a step")
    axes.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.savefig(path, dpi=150)

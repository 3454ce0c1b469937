"""Plots of the step benchmark."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = Mapping[str, Any]


def _name(row: Row) -> str:
    adapters = f", {row['adapters']} adapters" if row["adapters"] > 1 else ""
    return f"{row['model']}: {row['row']}{adapters}"


def plot_steps(rows: Sequence[Row], path: Path) -> None:
    """Bars of speed and of memory."""
    rows = [row for row in rows if "skipped" not in row][::-1]
    if not rows:
        return
    figure, (speed, memory) = plt.subplots(
        ncols=2, sharey=True, figsize=(10, 0.35 * len(rows) + 1.5)
    )
    names = [_name(row) for row in rows]
    speed.barh(names, [row["tokens_per_second"] for row in rows])
    speed.set_xlabel("tokens/s")
    memory.barh(names, [row["peak_gib"] or row["program_gib"] or 0 for row in rows])
    memory.set_xlabel("peak memory, GiB")
    _save(figure, path)


def plot_parts(parts: Sequence[Row], path: Path) -> None:
    """A bar for each row, made of the time of its parts."""
    names = list(dict.fromkeys(_name(part) for part in parts))[::-1]
    kinds = list(dict.fromkeys(part["part"] for part in parts))
    figure, axes = plt.subplots(figsize=(10, 0.4 * len(names) + 2))
    left = [0.0] * len(names)
    for kind in kinds:
        time = {_name(p): p["ms"] for p in parts if p["part"] == kind}
        widths = [time.get(name, 0.0) for name in names]
        axes.barh(names, widths, left=left, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("ms a step")
    axes.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    _save(figure, path)


def _save(figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)

"""Plots of the step benchmark."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from jaxlora.bench.report import COLOURS, HATCHES, device_of

Row = Mapping[str, Any]


def _name(row: Row) -> str:
    adapters = f", {row['adapters']} adapters" if row["adapters"] > 1 else ""
    return f"{row['model']}: {row['row']}{adapters}"


def _shape(row: Row) -> str:
    """The settings of a step, which the same row may have been measured with."""
    layers = "" if row["layers"] == "all" else f", {row['layers']} layers"
    tokens = f"{row['microbatches']} x {row['microbatch_tokens']:,} tokens"
    return f"{tokens}{layers}, dropout {row['dropout']:g}, {row['dtype']}"


def _kind(row: Row) -> str:
    """Whose step it is, which decides the colour."""
    name = row["row"]
    if name == "adapters off":
        return name
    return "jaxlora" if name.startswith("jaxlora") else "other tools"


def plot_steps(rows: Sequence[Row], path: Path) -> None:
    """Draws bars of speed and of memory, unless all rows were skipped.

    Of rows that were measured more than once, the last one is drawn.
    """
    done = {(_name(r), _shape(r)): r for r in rows if "skipped" not in r}
    rows = list(done.values())[::-1]
    if not rows:
        return
    figure = Figure(figsize=(10, 0.42 * len(rows) + 1.5), layout="constrained")
    speed, memory = figure.subplots(ncols=2, sharey=True)
    names = [f"{_name(row)}\n{_shape(row)}" for row in rows]
    kinds = list(dict.fromkeys(_kind(row) for row in rows[::-1]))
    for kind in kinds:
        mine = [row for row in rows if _kind(row) == kind]
        at = [i for i, row in enumerate(rows) if _kind(row) == kind]
        style = {"color": COLOURS[kinds.index(kind)], "label": kind}
        speed.barh(at, [row["tokens_per_second"] for row in mine], **style)
        bytes_of = [row["peak_gib"] or row["program_gib"] or 0 for row in mine]
        memory.barh(at, bytes_of, **style)
    speed.set_yticks(range(len(names)), names, fontsize=7)
    speed.set_xlabel("tokens/s")
    speed.xaxis.set_major_formatter("{x:,.0f}")
    speed.margins(y=0.01)
    memory.set_xlabel("peak memory, GiB")
    figure.suptitle(f"A whole training step on {device_of(rows)}", fontsize=10)
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(
        handles, labels, fontsize=8, ncols=len(kinds), loc="outside lower center"
    )
    figure.savefig(path, dpi=150)


def plot_parts(parts: Sequence[Row], path: Path) -> None:
    """Draws a bar for each row, made of the times of its parts."""
    names = list(dict.fromkeys(_name(part) for part in parts))[::-1]
    kinds = list(dict.fromkeys(part["part"] for part in parts))
    figure = Figure(figsize=(10, 0.4 * len(names) + 2), layout="tight")
    axes = figure.subplots()
    left = [0.0] * len(names)
    for i, kind in enumerate(kinds):
        time = {_name(p): p["ms"] for p in parts if p["part"] == kind}
        widths = [time.get(name, 0.0) for name in names]
        style = {
            "color": COLOURS[i % len(COLOURS)],
            "hatch": HATCHES[i // len(COLOURS)],
            "edgecolor": "white",
        }
        axes.barh(names, widths, left=left, label=kind, linewidth=0.3, **style)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("ms a step")
    axes.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.savefig(path, dpi=150)

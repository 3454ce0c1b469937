"""Says what the settings of recorded configurations are worth, as PLoRA does.

Tables 2 to 4 of PLoRA (arXiv 2508.02932) in small: how far the best configuration is
from a usual one, how far one setting moves the lowest loss, and which batch size is
best. The file holds the settings and the evaluations of each configuration.

    python -m scripts.bench quality tests/scripts/bench/curves/curves_smollm2.json
"""

import argparse
import json
import math
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from scripts.bench.report import table

USUAL_RATES = 1e-4, 3e-4  # of LoRA in the documentation of peft and its users
Row = dict[str, Any]


def read(path: pathlib.Path) -> tuple[list[int], list[Row]]:
    """Returns the steps of the evaluations, and settings and losses of each.

    Configurations that ended early or diverged are left out.
    """
    found = json.loads(path.read_text())
    rows = [
        dict(zip(found["settings"], one["settings"], strict=True))
        | {"losses": one["losses"]}
        for one in found["configurations"]
    ]
    whole = [row for row in rows if len(row["losses"]) == len(found["points"])]
    finite = [row for row in whole if all(map(math.isfinite, row["losses"]))]
    return found["points"], finite


def spread_rows(points: Sequence[int], rows: Sequence[Row]) -> Iterator[Row]:
    """Yields a row for the start, the worst, a usual, the median and the best one."""
    lowest = sorted(min(row["losses"]) for row in rows)
    low, high = USUAL_RATES
    usual = [min(row["losses"]) for row in rows if low <= row["learning_rate"] <= high]
    of_usual = f"median of {len(usual)} with rates of {low:g} to {high:g}"
    losses = {
        "before training": statistics.median(row["losses"][0] for row in rows),
        "worst": lowest[-1],
        of_usual: statistics.median(usual),
        f"median of all {len(rows)}": statistics.median(lowest),
        "best": lowest[0],
    }
    for name, loss in losses.items():
        shown = {"loss": round(loss, 3), "over_best": round(loss - lowest[0], 3)}
        yield {"configuration": name, **shown, "steps": points[-1]}


def setting_rows(points: Sequence[int], rows: Sequence[Row]) -> Iterator[Row]:
    """Yields a row for each setting: the lowest loss of each of its values.

    Learning rates are in decades.
    """
    for name in (n for n in rows[0] if n != "losses"):
        best: dict[Any, float] = {}
        for row in rows:
            value = row[name]
            if name == "learning_rate":
                value = f"1e{math.floor(math.log10(value))}"
            best[value] = min(best.get(value, math.inf), *row["losses"])
        top = min(best, key=lambda value: best[value])
        shown = ", ".join(f"{value}: {best[value]:.3f}" for value in sorted(best))
        spread = round(max(best.values()) - best[top], 3)
        yield {"setting": name, "best_value": top, "spread": spread, "lowest": shown}


def batch_rows(points: Sequence[int], rows: Sequence[Row]) -> Iterator[Row]:
    """Yields a row for each batch size: its lowest loss at equal steps and samples."""
    sizes = sorted({row["batch_size"] for row in rows})
    shared = (n * sizes[-1] for n in points[1:])
    samples = max(n for n in shared if all(n / size in points for size in sizes))
    for size in sizes:
        own = [row["losses"] for row in rows if row["batch_size"] == size]
        end = points.index(samples // size)
        yield {
            "batch_size": size,
            "configurations": len(own),
            f"loss_at_{points[-1]}_steps": round(min(map(min, own)), 3),
            f"loss_at_{samples}_samples": round(min(min(o[: end + 1]) for o in own), 3),
        }


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    out.add_argument("path", type=pathlib.Path, help="a file of recorded evaluations")


def run(args: argparse.Namespace) -> None:
    """Prints the tables."""
    points, rows = read(args.path)
    for make in (spread_rows, setting_rows, batch_rows):
        print(table(list(make(points, rows))), end="\n\n")

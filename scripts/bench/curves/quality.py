"""Says what the settings of recorded configurations are worth, as PLoRA does.

Tables 2 to 4 of PLoRA (arXiv 2508.02932) in small: how far one setting moves the lowest
loss, how far the best configuration is from a usual one, and which batch size is best.
"""

import json
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from jaxlora.errors import ConfigError

USUAL_RATES = 1e-4, 3e-4  # of LoRA in the documentation of peft and its users


def _read(path: pathlib.Path) -> tuple[list[int], list[dict[str, Any]]]:
    """Returns the steps of the evaluations, and the settings and losses of each."""
    try:
        found = json.loads(path.read_text())
        names, points = found["settings"], found["points"]
        rows = [
            dict(zip(names, one["settings"], strict=True)) | {"losses": one["losses"]}
            for one in found["configurations"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} has no settings beside its curves ({error}). Give a recorded "
            "file, such as tests/scripts/bench/curves/curves_smollm2.json."
        ) from error
    whole = [row for row in rows if len(row["losses"]) == len(points)]
    return points, [row for row in whole if all(map(math.isfinite, row["losses"]))]


def spread_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns a row for the start, the worst, a usual, the median and the best one.

    Raises:
        ConfigError: The file has no settings.
    """
    points, rows = _read(path)
    lowest = sorted(min(row["losses"]) for row in rows)
    low, high = USUAL_RATES
    usual = [min(row["losses"]) for row in rows if low <= row["learning_rate"] <= high]
    losses = {
        "before training": statistics.median(row["losses"][0] for row in rows),
        "worst": lowest[-1],
        f"median of {len(usual)} with rates of {low:g} to {high:g}": (
            statistics.median(usual)
        ),
        f"median of all {len(rows)}": statistics.median(lowest),
        "best": lowest[0],
    }
    return [
        {
            "configuration": name,
            "loss": round(loss, 3),
            "over_best": round(loss - lowest[0], 3),
            "steps": points[-1],
        }
        for name, loss in losses.items()
    ]


def setting_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns a row for each setting: the lowest loss of each of its values.

    Learning rates are in decades.

    Raises:
        ConfigError: The file has no settings.
    """
    _, rows = _read(path)
    out = []
    for name in (n for n in rows[0] if n != "losses"):
        best: dict[Any, float] = {}
        for row in rows:
            value = row[name]
            if name == "learning_rate":
                value = f"1e{math.floor(math.log10(value))}"
            best[value] = min(best.get(value, math.inf), *row["losses"])
        top = min(best, key=lambda value: best[value])
        out.append(
            {
                "setting": name,
                "best_value": top,
                "spread": round(max(best.values()) - best[top], 3),
                "lowest_by_value": ", ".join(
                    f"{value}: {best[value]:.3f}" for value in sorted(best)
                ),
            }
        )
    return out


def batch_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns a row for each batch size: its lowest loss at equal steps and samples.

    Raises:
        ConfigError: The file has no settings.
    """
    points, rows = _read(path)
    sizes = sorted({row["batch_size"] for row in rows})
    shared = [
        n * sizes[-1]
        for n in points[1:]
        if all(n * sizes[-1] / size in points for size in sizes)
    ]
    samples = max(shared)

    def lowest(size: int, last: Callable[[int], float]) -> float:
        own: Sequence[dict[str, Any]] = [r for r in rows if r["batch_size"] == size]
        end = points.index(int(last(size)))
        return min(min(row["losses"][: end + 1]) for row in own)

    return [
        {
            "batch_size": size,
            "configurations": sum(row["batch_size"] == size for row in rows),
            f"loss_at_{points[-1]}_steps": round(lowest(size, lambda _: points[-1]), 3),
            f"loss_at_{samples}_samples": round(
                lowest(size, lambda one: samples / one), 3
            ),
        }
        for size in sizes
    ]

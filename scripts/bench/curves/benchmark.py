"""Replays rules of early exit on the curves of a sweep.

It says what each rule would have saved, and in how many sweeps it would have ended the
best configuration, or one of the best three, before its lowest loss. The curves are
those of a run's folder, whose sweep had `early_exit: []` and evaluated its
configurations at equal steps, or of a file of recorded ones.

    python -m scripts.bench curves RUN_DIR
    python -m scripts.bench curves tests/scripts/bench/curves/curves_smollm2.json

With `--quality`, it says instead what the settings of a recorded file are worth.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.config.sweep_config import ExitRule
from jaxlora.errors import ConfigError
from jaxlora.run.log import METRICS_FILE, read_events
from jaxlora.sweeps.ranking import Points, curves_of
from jaxlora.sweeps.rules import Curve
from scripts.bench.curves.quality import batch_rows, setting_rows, spread_rows
from scripts.bench.curves.replay import count_losses
from scripts.bench.report import Rows, add_output_dir, table

_CURE = "Give the folder of a sweep whose configurations were evaluated to their ends."
RULES = (
    ExitRule(type="halving"),
    ExitRule(type="asha"),
    ExitRule(type="median"),
    ExitRule(type="catch_up"),
    ExitRule(type="overfitting"),
    ExitRule(type="halving", eta=4, first=0.1),
    ExitRule(type="asha", eta=4, first=0.05),
)


def read_curves(path: pathlib.Path) -> dict[str, Curve]:
    """Reads the curves that have an end, from a run's folder or a recorded file.

    Raises:
        ConfigError: There are none.
    """
    try:
        if path.is_dir():
            losses = curves_of(read_events(path / METRICS_FILE), "eval_loss")
        else:
            losses = _of_file(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no curves ({error}). {_CURE}") from error
    last = max((curve[-1][0] for curve in losses.values() if curve), default=0)
    whole = {
        name: Curve(num_steps=last, step=last, points=curve)
        for name, curve in losses.items()
        if curve and curve[-1][0] == last and all(math.isfinite(x) for _, x in curve)
    }
    if not whole:
        raise ConfigError(f"{path} holds no curves with an end. {_CURE}")
    return whole


def _of_file(path: pathlib.Path) -> dict[str, Points]:
    found = json.loads(path.read_text())
    return {
        f"c{i}": tuple(zip(found["points"], one["losses"], strict=False))
        for i, one in enumerate(found["configurations"])
    }


def rule_rows(
    curves: Mapping[str, Curve], sizes: Sequence[int], slots: int, sweeps: int
) -> list[dict[str, Any]]:
    """Returns a row for each rule and number of configurations."""
    rows = []
    for size in sizes:
        for rule in RULES:
            found = count_losses(curves, [rule], size=size, slots=slots, sweeps=sweeps)
            own = rule.model_dump(exclude_defaults=True)
            rows.append(
                {
                    "rule": ", ".join(
                        str(v) if k == "type" else f"{k} {v}" for k, v in own.items()
                    ),
                    "configurations": size,
                    "sweeps": sweeps,
                    "steps_saved": f"{100 * found.saved:.0f} %",
                    "best_lost": found.best_lost,
                    "one_of_best_3_lost": found.top_3_lost,
                    "mean_regret": round(found.mean_regret, 4),
                    "most_regret": round(found.most_regret, 4),
                }
            )
    return rows


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    out.add_argument("path", type=pathlib.Path, help="a run's folder, or a file")
    out.add_argument(
        "--quality",
        action="store_true",
        help="what the settings of a recorded file are worth: PLoRA's Tables 2 to 4",
    )
    out.add_argument("--slots", type=int, default=32, help="running at once")
    out.add_argument("--sizes", type=int, nargs="+", default=[40, 120])
    out.add_argument("--sweeps", type=int, default=40, help="to replay for each rule")


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    if args.quality:
        for make in (spread_rows, setting_rows, batch_rows):
            print(table(make(args.path)), end="\n\n")
        return
    curves = read_curves(args.path)
    rows = Rows(args.output_dir, "curves", table)
    for row in rule_rows(curves, args.sizes, args.slots, args.sweeps):
        rows.add(row)
    print(rows.tables())

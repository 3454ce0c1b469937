"""Records the curves of a sweep, and replays rules of early exit on them.

With --record, it trains the configurations of a random search to their ends and writes
their held-out losses to a file. The model is a folder, or the name of a shape, which
gets random weights and a token for each byte; the text is Python's own documentation.
With a file, it says what each rule would have saved, and in how many sweeps it would
have ended the best configuration, or one of the best three, before its lowest loss.

    jaxlora bench curves --record curves.json --model smollm2-135m
    jaxlora bench curves curves.json
"""

import argparse
import json
import math
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.bench.curves.replay import count_losses
from jaxlora.bench.options import add_output_dir
from jaxlora.bench.report import Row, Rows, table
from jaxlora.bench.shapes import MODELS
from jaxlora.config.sweep_config import ExitRule
from jaxlora.errors import ConfigError
from jaxlora.sweeps.rules import Curve

RULES = (
    ExitRule(type="halving"),
    ExitRule(type="asha"),
    ExitRule(type="median"),
    ExitRule(type="catch_up"),
    ExitRule(type="overfitting"),
    ExitRule(type="halving", eta=4, first=0.1),
    ExitRule(type="asha", eta=4, first=0.05),
)


def read_curves(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Curve]]:
    """Reads a recorded file: what it is about, and the curves that have an end.

    Raises:
        ConfigError: It is no such file.
    """
    try:
        found = json.loads(path.read_text())
        points, about = found["points"], found["about"]
        curves = [c["losses"] for c in found["configurations"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no recorded curves ({error}). Make it with `jaxlora bench "
            "curves --record`."
        ) from error
    whole = {
        f"c{i}": Curve(
            num_steps=points[-1],
            step=points[-1],
            points=tuple(zip(points, losses, strict=True)),
        )
        for i, losses in enumerate(curves)
        if len(losses) == len(points) and all(map(math.isfinite, losses))
    }
    return about, whole


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


def tables(rows: Sequence[Row]) -> str:
    """Formats the rows."""
    return table(rows)


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    out.add_argument("file", nargs="?", type=pathlib.Path, help="recorded curves")
    out.add_argument(
        "--record", type=pathlib.Path, metavar="FILE", help="file to write"
    )
    out.add_argument(
        "--model",
        default="smollm2-135m",
        help=f"a checkpoint's folder, or with random weights: {', '.join(MODELS)}",
    )
    out.add_argument("--count", type=int, default=208, help="configurations to record")
    out.add_argument("--steps", type=int, default=100, help="of each configuration")
    out.add_argument("--every", type=int, default=5, help="steps between evaluations")
    out.add_argument("--slots", type=int, default=32, help="running at once")
    out.add_argument("--records", type=int, default=240, help="training records")
    out.add_argument("--microbatch-tokens", type=int, default=8192)
    out.add_argument("--seed", type=int, default=0)
    out.add_argument(
        "--most-seconds",
        type=float,
        help="then, only those that have ended are recorded",
    )
    out.add_argument("--sizes", type=int, nargs="+", default=[40, 120])
    out.add_argument("--sweeps", type=int, default=40, help="to replay for each rule")


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    if (args.record is None) == (args.file is None):
        raise ConfigError("give either a file of curves, or --record and a file.")
    if args.record is not None:
        _record(args)
        return
    _, curves = read_curves(args.file)
    rows = Rows(args.output_dir, "curves", tables)
    for row in rule_rows(curves, args.sizes, args.slots, args.sweeps):
        rows.add(row)
    print(rows.tables())


def _record(args: argparse.Namespace) -> None:
    from jaxlora.bench.curves.record import Recording, record
    from jaxlora.bench.run.inputs import Inputs, write_checkpoint
    from jaxlora.memory.gpu_share import take_free_gpus

    take_free_gpus()
    names = Recording.__dataclass_fields__
    what = Recording(**{name: getattr(args, name) for name in names})
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        model = pathlib.Path(args.model)
        if args.model in MODELS:
            model = work / "model"
            write_checkpoint(Inputs(model=args.model), model)
        found = record(what, model, work, args.model)
    args.record.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(c, separators=(",", ":")) for c in found.pop("configurations")]
    head = json.dumps(found)[:-1]
    text = head + ', "configurations": [\n' + ",\n".join(lines) + "\n]}\n"
    args.record.write_text(text)
    print(f"{len(lines)} configurations, {len(text):,} bytes: {args.record}")

"""Times whole runs as a user has them, from the command to the end.

It makes a checkpoint with random weights, jobs with samples of different lengths and a
run file, and runs these commands, each in a process of its own, with the files in the
page cache:

- cold: `jaxlora train` with an empty cache of compiled programs.
- again: the same with a new output folder, and with what the first has kept.
- resumed: `jaxlora train --resume` after a third run was killed at a checkpoint.
- generate, cold and again: `jaxlora generate` of one token with all adapters.
- peft: one step of transformers + peft with one adapter on the same checkpoint.

Rows have the seconds to the end of the first step, and the tokens per second from there
to the end, evaluations and checkpoints included. Prints a table; with --output-dir,
writes run.jsonl, run.md and the log of each command with the seconds of its lines.

    python -m scripts.bench run --output-dir bench
    python -m scripts.bench run --model tiny --tokens 20000
"""

import argparse
import importlib.util
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxlora.errors import JaxloraError
from jaxlora.run.folder import ADAPTERS, CHECKPOINTS
from jaxlora.run.log import METRICS_FILE, read_events
from scripts.bench.report import Row, Rows, about, add_output_dir, devices, table
from scripts.bench.run.commands import Done, run_command
from scripts.bench.run.inputs import (
    Inputs,
    write_checkpoint,
    write_data,
    write_run_file,
)
from scripts.bench.shapes import LARGE, MODELS

Columns = dict[str, Any]
STARTS = ("cold", "again", "resumed", "generate cold", "generate again", "peft")
_COLUMNS = (
    "start", "first_step_s", "seconds", "tokens", "tokens_per_second", "outside_s",
    "fill",
)  # fmt: skip


class Commands:
    """The commands, which share a checkpoint, the data and a cache."""

    def __init__(self, inputs: Inputs, work: Path, checkpoint: Path):
        """Writes checkpoint and data.

        Args:
            inputs: What is trained.
            work: Folder for everything else, which must be empty.
            checkpoint: Folder of the checkpoint, which is kept for the next time.
        """
        self._inputs, self._work, self._checkpoint = inputs, work, checkpoint
        write_checkpoint(inputs, checkpoint)
        self._data = write_data(inputs, work / "data")

    def _run_file(self, name: str) -> tuple[Path, Path]:
        output_dir = self._work / name.replace(" ", "-")
        arguments = self._inputs, self._checkpoint, self._data, output_dir
        return write_run_file(*arguments), output_dir

    def train(self, start: str) -> Columns:
        """Trains from the beginning to the end."""
        path, output_dir = self._run_file(start)
        done = run_command(["jaxlora", "train", str(path)], self._with_cache("train"))
        return _trained(start, done, output_dir)

    def _with_cache(self, name: str) -> dict[str, str]:
        """Returns the variables of a command that uses a cache of this name."""
        return {
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(self._work / "cache" / name),
        }

    def resumed(self, start: str) -> Columns:
        """Kills a run after its first checkpoint, and resumes it."""
        path, output_dir = self._run_file(start)
        command = ["jaxlora", "train", str(path)]
        folder = output_dir / CHECKPOINTS

        def is_saved() -> bool:
            return folder.exists() and any(p.name.isdigit() for p in folder.iterdir())

        environment = self._with_cache("train")
        run_command(command, environment, kill_when=is_saved)
        done = run_command([*command, "--resume"], environment)
        return _trained(start, done, output_dir)

    def generate(self, start: str) -> Columns:
        """Generates a token with every adapter of the first run."""
        folder = self._work / "cold" / ADAPTERS
        adapters = [f"--adapter={path}" for path in sorted(folder.iterdir())]
        command = ["jaxlora", "generate", str(self._checkpoint), *adapters]
        command += ["--prompt", "the quick brown fox", "--max-new-tokens", "1"]
        if (quantize := self._inputs.settings.get("quantize_base")) is not None:
            command += ["--quantize", quantize]
        done = run_command(command, self._with_cache("generate"))
        return _row(start, done, first_step=done.seconds)

    def peft(self, start: str) -> Columns:
        """Runs one step of peft."""
        needed = ("torch", "transformers", "peft")
        if missing := [n for n in needed if importlib.util.find_spec(n) is None]:
            return {"start": start, "skipped": f"{', '.join(missing)} not installed"}
        command = ["scripts.bench.run.peft_step", str(self._checkpoint)]
        command.append(str(self._data[0]))
        done = run_command(command, self._with_cache("peft"))
        ended = next(at for at, text in done.lines if text == "step ended")
        return _row(start, done, first_step=ended)


def _trained(start: str, done: Done, output_dir: Path) -> Columns:
    """Describes a run that trained to its end.

    `outside_s` is the time from the first step to the end that no window counts: that
    of evaluations, checkpoints and exports for which training stood still.
    """
    events = [
        event
        for event in read_events(output_dir / METRICS_FILE)
        if event["time"] >= done.began
    ]
    mine = [event for event in events if event["event"] == "step"]
    windows = [event for event in events if event["event"] == "window"]
    if not mine:
        raise JaxloraError(f"{start}: no step is left to time. Give more --tokens.")
    first, last = mine[0]["time"], max(e["time"] for e in mine)
    tokens = sum(e["num_tokens"] for e in mine if e["time"] > first)
    after = [w for w in windows if w["time"] > first][1:]
    rows = sum(w["num_tokens"] / w["fill"] for w in after if w["fill"])
    return _row(start, done, first_step=first - done.began) | {
        "tokens": tokens,
        "tokens_per_second": round(tokens / (last - first)) if last > first else None,
        "outside_s": _outside(windows),
        "fill": round(sum(w["num_tokens"] for w in after) / rows, 3) if rows else None,
    }


def _outside(windows: Sequence[dict[str, Any]]) -> float:
    pairs = itertools.pairwise(windows)
    return round(sum(b["time"] - a["time"] - b["seconds"] for a, b in pairs), 2)


def _row(start: str, done: Done, *, first_step: float) -> Columns:
    return {
        "start": start,
        "first_step_s": round(first_step, 1),
        "seconds": round(done.seconds, 1),
        "log": [f"{at:.2f} {text}" for at, text in done.lines],
    }


def tables(rows: Sequence[Row]) -> str:
    """Formats the rows."""
    return table(rows, [*_COLUMNS, "skipped"])


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    out.add_argument("--model", choices=MODELS, default=LARGE)
    out.add_argument("--layers", type=int, help="replaces the model's own number")
    out.add_argument("--jobs", type=int, default=4)
    out.add_argument("--tokens", type=int, default=950_000, help="of all jobs together")
    out.add_argument("--batch-size", type=int, default=8)
    out.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        help="setting of the run file, in YAML; repeatable",
    )
    out.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    out.add_argument(
        "--checkpoint",
        type=Path,
        help="folder for the random checkpoint, which is kept and used again; by "
        "default it is temporary",
    )


def _setting(text: str) -> tuple[str, Any]:
    """Parses `NAME=VALUE`."""
    name, separator, value = text.partition("=")
    try:
        if name and separator:
            return name, yaml.safe_load(value)
    except yaml.YAMLError:
        pass
    raise argparse.ArgumentTypeError(
        f"{text!r} is not NAME=VALUE with a value in YAML, such as remat=mlp"
    )


def _check_order(starts: Sequence[str]) -> None:
    """Checks that what a start needs is there when its turn comes.

    Raises:
        JaxloraError: Adapters that generation needs are trained later or not at all.
    """
    for number, start in enumerate(starts):
        if start.startswith("generate") and "cold" not in starts[:number]:
            raise JaxloraError(
                f"--starts: {start!r} generates with the adapters that 'cold' trains. "
                "Name cold before it."
            )


def measured(args: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """Yields a row for each start.

    Raises:
        JaxloraError: The starts are in an impossible order, or a command failed.
    """
    _check_order(args.starts)
    settings = dict(args.set)
    inputs = Inputs(
        model=args.model,
        layers=args.layers,
        jobs=args.jobs,
        tokens=args.tokens,
        batch_size=args.batch_size,
        settings=settings,
    )
    commands = Commands(inputs, work, args.checkpoint or work / "checkpoint")
    kinds = {
        "cold": commands.train,
        "again": commands.train,
        "resumed": commands.resumed,
        "generate cold": commands.generate,
        "generate again": commands.generate,
        "peft": commands.peft,
    }
    about_inputs = {"model": args.model, "layers": args.layers or "all"}
    about_inputs["set"] = json.dumps(settings)
    for start in args.starts:
        yield about_inputs | kinds[start](start)


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    rows, device = Rows(args.output_dir, "run", tables), devices()[2]
    with tempfile.TemporaryDirectory(prefix="jaxlora-bench-run-") as work:
        for row in measured(args, Path(work)):
            log = row.pop("log", [])
            if args.output_dir is not None:
                path = args.output_dir / f"run {row['start']}.log".replace(" ", "-")
                path.write_text("\n".join(log) + "\n")
            rows.add(row | about(device))
    print(rows.tables())

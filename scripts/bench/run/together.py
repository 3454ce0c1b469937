"""Times a sweep against one configuration at a time, and against transformers + peft.

It makes a checkpoint with random weights and data from Python's documentation, as
bytes, and runs these commands, each in a process of its own. Programs are compiled
before by runs of two steps, so that start-up counts and compiling does not:

- sweep, halving: `jaxlora sweep` of all configurations, without and with early exit.
- alone: `jaxlora train` of one configuration with the smallest and the largest batch.
  `one at a time` in the table adds up such runs for the batch sizes of the sweep; those
  between are interpolated.
- peft: the first step of one configuration of batch 2, and some more, with
  transformers + peft; a configuration takes the first step and as many as it has.
- packed: configurations of rank 32 and batch 1 at once, whose tokens per second, after
  the first window, are compared with the one alone that has this batch, as in Figure 5
  of PLoRA (arXiv 2508.02932).
- kernels: a linear with 2, 8 and 32 adapters of rank 64 in one call, and in as many
  calls, as in PLoRA's Table 7: device time, and the time of calls back to back.

    python -m scripts.bench together --output-dir bench
    python -m scripts.bench together --model llama-3.2-1b --steps 100 --limit 300
    python -m scripts.bench together --model tiny --count 4 --steps 4 --cases sweep
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import yaml

from jaxlora.run.log import METRICS_FILE, read_events
from scripts.bench.report import (
    Row,
    Rows,
    about,
    add_output_dir,
    devices,
    sections,
    table,
)
from scripts.bench.run import peft_step
from scripts.bench.run.commands import Done, run_command
from scripts.bench.run.inputs import Inputs, write_checkpoint
from scripts.bench.run.packed_kernels import kernel_rows
from scripts.bench.shapes import ANY_DEVICE, MODELS

CASES = ("sweep", "halving", "alone", "peft", "packed", "kernels")
_BATCHES, _PACKED, _RECORDS, _PEFT_STEPS = (1, 2, 3, 4), (8, 32), 1500, 20
_LONGEST, _WARM = 1024, "alone warm-up"  # tokens of the longest sample, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """A model and configurations to train on it.

    Attributes:
        model: One of `shapes.MODELS`.
        count: Number of configurations.
        steps: Steps of each.
        work: Folder for everything.
        tokens: `microbatch_tokens` of the sweep.
        early_exit: The rule of the case `halving`.
        peft_python: An interpreter with torch, transformers and peft.
        end: When time is up, by `time.monotonic`.
    """

    model: str
    count: int
    steps: int
    work: Path
    tokens: int | str = "auto"
    early_exit: Any = "halving"
    peft_python: str = sys.executable
    end: float = math.inf

    def write(self) -> None:
        """Writes the checkpoint and the data, unless they are there already."""
        write_checkpoint(Inputs(model=self.model), self.work / "model")
        if (data := self.work / "data.jsonl").exists():
            return
        text = "\n".join(topics.values()).encode("ascii", "replace").decode()
        rng, at = np.random.default_rng(0), 0
        longest = 200 if self.model in ANY_DEVICE else 900
        with data.open("w") as file:
            for _ in range(_RECORDS):
                n = int(np.clip(rng.lognormal(np.log(200), 0.6), 30, longest))
                at = (at + n) % (len(text) - 2000)
                cut = at + n // 2
                record = {"prompt": text[at:cut], "completion": text[cut : at + n]}
                file.write(json.dumps(record) + "\n")

    def run(
        self, name: str, command: str, steps: int, **settings: Any
    ) -> dict[str, Any]:
        """Runs a command on a run file; returns its seconds and those of training."""
        folder = self.work / name.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier call
        defaults = {
            "data": {"path": str(self.work / "data.jsonl")},
            "steps": steps,
            "rank": 32,
            "target_modules": "all-linear",
            "dropout": 0.05,
            "max_length": _LONGEST,
            "eval_fraction": 0.01,
            "eval_every": max(1, steps // 4),
            "eval_seed": 0,
        }
        content = {
            "model": str(self.work / "model"),
            "output_dir": str(folder),
            "checkpoint_every": None,
            "defaults": defaults,
            **settings,
        }
        path = folder.with_suffix(".json")
        path.write_text(json.dumps(content))
        done = self._done(["jaxlora", command, str(path)])
        log = "".join(f"{at:.2f} {text}\n" for at, text in done.lines)
        folder.with_suffix(".log").write_text(log)
        windows = [
            e for e in read_events(folder / METRICS_FILE) if e["event"] == "window"
        ]
        found = json.loads((folder / "summary.json").read_text())
        seconds = sum(w["seconds"] for w in windows)
        after = windows[1:] or windows
        return {
            "row": name,
            "seconds": round(done.seconds, 1),
            "training_s": round(seconds, 2),
            "predicted_s": found["seconds"]["predicted"],
            "tokens": sum(w["num_tokens"] for w in windows),
            "steady_tokens_per_second": round(
                sum(w["num_tokens"] for w in after) / sum(w["seconds"] for w in after)
            ),
            "best_loss": min(job["best_eval"] for job in found["jobs"].values()),
            **phases(done),
        }

    def _done(self, command: Sequence[str], python: str = sys.executable) -> Done:
        """Runs a module to its end.

        Raises:
            TimeoutError: Time is up.
        """
        is_late = lambda: time.monotonic() > self.end
        cache = str(self.work / "cache")
        environment = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": cache}
        done = run_command(command, environment, kill_when=is_late, python=python)
        if is_late():
            raise TimeoutError
        return done

    def warm_up(self, name: str, run: Callable[[int], Any]) -> None:
        """Lets a command compile its programs by two steps, unless it has done so."""
        if not (self.work / name.replace(" ", "-") / "summary.json").exists():
            run(2)

    # ---- the cases -------------------------------------------------------------------

    def sweep(self, name: str, steps: int, early_exit: Any) -> dict[str, Any]:
        """Runs the sweep."""
        space = {
            "learning_rate": _RATES,
            "rank": [8, 16, 32],
            "lora_alpha": {"times": "rank", "values": [1, 2]},
            "batch_size": list(_BATCHES),
            "dropout": [0, 0.05],
        }
        sweep = {"count": self.count, "seed": 1, "parameters": space}
        found = self.run(
            name,
            "sweep",
            steps,
            max_concurrent_jobs=self.count,
            microbatch_tokens=self.tokens,
            sweep=sweep | {"early_exit": early_exit},
        )
        text = (self.work / name.replace(" ", "-") / "settings.yaml").read_text()
        rule = json.dumps(early_exit).strip('"')
        return dict(found) | {"early_exit": rule, "batches": _batches(text)}

    def alone(self, name: str, steps: int, batch: int) -> Row:
        """Trains one configuration, in microbatches for its longest sample."""
        job = {"name": "one", "batch_size": batch, "learning_rate": 1e-3}
        tokens = {"microbatch_tokens": _LONGEST}
        return self.run(name, "train", steps, jobs=[job], **tokens)

    def packed(self, name: str, steps: int, count: int) -> Row:
        """Trains configurations of rank 32 and batch 1 at once.

        A microbatch holds one sample of each, by their mean length.
        """
        space = {"learning_rate": _RATES, "batch_size": [1]}
        sweep = {"count": count, "seed": 1, "parameters": space, "early_exit": "none"}
        return self.run(
            name,
            "sweep",
            steps,
            max_concurrent_jobs=count,
            microbatch_tokens=max(_LONGEST, _LONGEST // 4 * count),
            sweep=sweep,
        )

    def peft(self) -> Row:
        """Runs some steps of peft."""
        # By its path, as that interpreter need not have this package.
        command = [peft_step.__file__, str(self.work / "model")]
        command += [str(self.work / "data.jsonl"), "2", str(_PEFT_STEPS)]
        done = self._done(command, self.peft_python)
        ends = [at for at, text in done.lines if text == "step ended"]
        each = (ends[-1] - ends[0]) / (len(ends) - 1)
        return {
            "row": "peft",
            "seconds": round(ends[0] + (self.steps - 1) * each, 1),
            "first_step_s": round(ends[0], 1),
            "step_s": round(each, 4),
        }

    def compile(self, cases: Sequence[str]) -> None:
        """Runs two steps of each command, so that its programs are compiled."""
        if {"sweep", "halving"} & set(cases):
            name = f"sweep warm-up {self.tokens}"
            self.warm_up(name, lambda steps: self.sweep(name, steps, "none"))
        if "alone" in cases:
            self.warm_up(_WARM, lambda steps: self.alone(_WARM, steps, 1))
        for count in _PACKED if "packed" in cases else ():
            name = f"packed warm-up {count}"
            run = lambda steps, name=name, count=count: self.packed(name, steps, count)
            self.warm_up(name, run)

    def rows(self, cases: Sequence[str]) -> Iterator[Row]:
        """Yields the rows of cases, in the order in which the cases are given."""
        for case in cases:
            if case == "sweep":
                yield self.sweep("sweep", self.steps, "none")
            elif case == "halving":
                yield self.sweep("halving", self.steps, self.early_exit)
            elif case == "alone":
                for batch in (min(_BATCHES), max(_BATCHES)):
                    yield self.alone(f"alone batch {batch}", self.steps, batch)
            elif case == "peft":
                yield self.peft()
            elif case == "packed":
                for count in _PACKED:
                    yield self.packed(f"packed {count}", self.steps // 2, count)
            elif case == "kernels":
                yield from kernel_rows()


def phases(done: Done) -> dict[str, Any]:
    """Returns when the jobs of a run started and ended, by the lines of its log.

    `spent` is what the run says about its time; `after_run_s` follows that line: the
    report, and the end of the process.
    """
    starts = [at for at, text in done.lines if " starts in slot " in text]
    ends = [at for at, text in done.lines if _END.search(text)]
    spent = [(at, text) for at, text in done.lines if _SPENT in text]
    if not (starts and ends and spent):
        return {}
    return {
        "first_start_s": round(starts[0], 1),
        "starts_s": round(starts[-1] - starts[0], 2),
        "ends_s": round(ends[-1] - ends[0], 2),
        "after_ends_s": round(done.seconds - ends[-1], 2),
        "after_run_s": round(done.seconds - spent[-1][0], 2),
        "spent": spent[-1][1].partition(_SPENT)[2],
    }


_END = re.compile(r": (finished|stopped early|stopped|failed) \(")
_SPENT = "seconds since the start of the run: "
_RATES = {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-2}


def _batches(settings: str) -> dict[str, int]:
    """Counts the batch sizes of the jobs of a resolved run file."""
    found = collections.Counter(
        str(job.get("batch_size", 1)) for job in yaml.safe_load(settings)["jobs"]
    )
    return dict(sorted(found.items()))


def tables(rows: Sequence[Row]) -> str:
    """Formats the rows, and the speeds that follow from them."""
    hidden = {"commit", "device", "versions", "date", "batches"}
    runs = [row for row in rows if row["row"] != "kernels"]
    shown = [key for row in runs for key in row if key not in hidden]
    kernels = [row for row in rows if row["row"] == "kernels"]
    made = {"runs": table(runs, list(dict.fromkeys(shown)))}
    for model in dict.fromkeys(row["model"] for row in runs):
        found = {row["row"]: row for row in runs if row["model"] == model}
        made[f"speed of {model}"] = table(list(speeds(found)))
    made["kernels in one call"] = table(
        kernels, [key for key in (kernels or [{}])[0] if key not in hidden | {"row"}]
    )
    return sections(made)


def speeds(found: Mapping[str, Row]) -> Iterator[dict[str, Any]]:
    """Yields speeds of the sweep over others, and of packed configurations."""
    sweep, halving = found.get("sweep"), found.get("halving")
    alone = {
        int(name.rpartition(" ")[2]): row["seconds"]
        for name, row in sorted(found.items())
        if name.startswith("alone")
    }
    for row in (sweep, halving):
        if row is None:
            continue
        batches = {int(size): count for size, count in row["batches"].items()}
        if len(alone) > 1:
            each = np.interp(list(batches), list(alone), list(alone.values()))
            total = float(np.dot(list(batches.values()), each))
            yield _speed(row, "one at a time", total)
        if (peft := found.get("peft")) is not None:
            yield _speed(row, "peft", sum(batches.values()) * peft["seconds"])
    if sweep is not None and halving is not None:
        yield _speed(halving, "sweep", sweep["seconds"])
        yield _speed(halving, "sweep, training", sweep["training_s"], "training_s")
    rate = "steady_tokens_per_second"
    for many in found.values():
        one = found.get("alone batch 1")
        if many["row"].startswith("packed") and one is not None:
            ratio = round(many[rate] / one[rate], 2)
            yield {"row": many["row"], "over": "one alone, tokens/s", "speed": ratio}


def _speed(row: Row, over: str, seconds: float, key: str = "seconds") -> dict[str, Any]:
    speed = round(seconds / row[key], 2)
    of = {"seconds": row[key], "seconds_of_the_other": round(seconds, 1)}
    return {"row": row["row"], "over": over, "speed": speed, **of}


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    out.add_argument("--model", choices=MODELS, default="smollm2-135m")
    out.add_argument("--count", type=int, default=64, help="configurations")
    out.add_argument("--steps", type=int, default=200, help="of each")
    out.add_argument(
        "--microbatch-tokens",
        type=yaml.safe_load,
        default="auto",
        help="of the sweep, by default auto",
    )
    out.add_argument(
        "--early-exit",
        type=yaml.safe_load,
        default="halving",
        help="rule of the case halving, in YAML",
    )
    out.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=CASES,
        help="in this order",
    )
    out.add_argument(
        "--limit", type=float, default=math.inf, help="seconds; the rest is left out"
    )
    out.add_argument(
        "--work",
        type=Path,
        help="folder for the checkpoint, data and compiled programs, which are kept "
        "and used again; by default it is temporary",
    )
    out.add_argument(
        "--peft-python", default=sys.executable, help="interpreter that has peft"
    )


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    began = time.monotonic()
    rows = Rows(args.output_dir, "together", tables)
    with contextlib.ExitStack() as stack:
        work = args.work
        if work is None:
            made = tempfile.TemporaryDirectory(prefix="jaxlora-bench-")
            work = Path(stack.enter_context(made))
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(
            model=args.model,
            count=args.count,
            steps=args.steps,
            work=work,
            tokens=args.microbatch_tokens,
            early_exit=args.early_exit,
            peft_python=args.peft_python,
            end=began + args.limit,
        )
        try:
            bench.write()
            bench.compile(args.cases)
            end = {"model": args.model, "steps": args.steps} | about(devices()[2])
            for row in bench.rows(args.cases):
                rows.add(dict(row) | end)
        except TimeoutError:
            print(
                f"Time is up after {args.limit:.0f} s; what is left was not measured."
            )
    print(rows.tables())

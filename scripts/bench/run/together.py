"""Times a sweep against one configuration at a time, and against transformers + peft.

It makes a checkpoint with random weights and data from Python's documentation, as
bytes, and runs these commands, each in a process of its own. Programs are compiled
before by a run of two steps, so that start-up counts and compiling does not:

- sweep, halving: `jaxlora sweep` of all configurations, without and with early exit.
- alone: `jaxlora train` of one configuration with batches of 1, 2 and 4. `one at a
  time` in the table adds up such runs for the batch sizes of the sweep; batches of 3
  are half-way between those of 2 and 4.
- peft: the first step of one configuration of batch 2, and some more, with
  transformers + peft; a configuration takes the first step and as many as it has.
- packed: configurations of rank 32 and batch 1 at once, whose tokens per second, after
  the first window, are compared with one alone, as in Figure 5 of PLoRA
  (arXiv 2508.02932).
- kernels: a linear with 2, 8 and 32 adapters of rank 64 in one call, and in calls one
  after the other, as in PLoRA's Table 7; device time, with the frozen product, and the
  adapters alone by subtraction.

    jaxlora bench together --output-dir bench
    jaxlora bench together --model tiny --count 4 --steps 4 --cases sweep alone
"""

import argparse
import collections
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from jaxlora.bench.report import Row, Rows, about, add_output_dir, sections, table
from jaxlora.bench.run.benchmark import device_name
from jaxlora.bench.run.commands import run_command
from jaxlora.bench.run.inputs import Inputs, write_checkpoint
from jaxlora.bench.shapes import ANY_DEVICE, MODELS, KernelCase
from jaxlora.run.log import METRICS_FILE, read_events

CASES = ("sweep", "halving", "alone", "peft", "packed", "kernels")
_BATCHES, _RECORDS, _PEFT_STEPS = (1, 2, 3, 4), 1500, 20
_PACKED, _KERNELS, _METHOD = (8, 32), (2, 8, 32), "jaxlora mosaic"
_PAPER = {2: "1.90 to 2.01", 8: "7.51 to 7.98", 32: "26.5 to 31.2"}  # PLoRA's Table 7
_WIDTHS = {  # of PLoRA's Table 7
    "3B attention": (2048, 2048),
    "3B MLP": (2048, 11008),
    "7B attention": (3584, 3584),
    "7B MLP": (3584, 18944),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """A model and configurations to train on it.

    Attributes:
        model: One of `shapes.MODELS`.
        count: Number of configurations.
        steps: Steps of each.
        work: Folder for everything.
    """

    model: str
    count: int
    steps: int
    work: Path

    def write(self) -> None:
        """Writes the checkpoint and the data."""
        write_checkpoint(Inputs(model=self.model), self.work / "model")
        text = "\n".join(topics.values()).encode("ascii", "replace").decode()
        rng, at = np.random.default_rng(0), 0
        longest = 200 if self.model in ANY_DEVICE else 900
        with (self.work / "data.jsonl").open("w") as file:
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
        defaults = {
            "data": {"path": str(self.work / "data.jsonl")},
            "steps": steps,
            "rank": 32,
            "target_modules": "all-linear",
            "dropout": 0.05,
            "max_length": 1024,
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
        done = run_command(
            ["jaxlora", command, str(path)],
            {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(self.work / "cache")},
        )
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
        }

    # ---- the cases -------------------------------------------------------------------

    def sweep(self, name: str, steps: int, early_exit: str) -> dict[str, Any]:
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
            microbatch_tokens=_capacity(self.model),
            sweep=sweep | {"early_exit": early_exit},
        )
        text = (self.work / name.replace(" ", "-") / "settings.yaml").read_text()
        return dict(found) | {"batches": _batches(text)}

    def alone(self, name: str, steps: int, batch: int) -> Row:
        """Trains one configuration."""
        job = {"name": "one", "batch_size": batch, "learning_rate": 1e-3}
        return self.run(name, "train", steps, jobs=[job])

    def packed(self, count: int) -> Row:
        """Trains configurations of rank 32 and batch 1 at once."""
        sweep = {"count": count, "seed": 1, "parameters": {"learning_rate": _RATES}}
        return self.run(
            f"packed {count}",
            "sweep",
            self.steps // 2,
            max_concurrent_jobs=count,
            sweep=sweep | {"early_exit": "none"},
        )

    def peft(self) -> Row:
        """Runs some steps of peft."""
        command = ["jaxlora.bench.run.peft_step", str(self.work / "model")]
        command += [str(self.work / "data.jsonl"), "2", str(_PEFT_STEPS)]
        done = run_command(command, {"HF_HUB_OFFLINE": "1"})
        ends = [at for at, text in done.lines if text == "step ended"]
        each = (ends[-1] - ends[0]) / (len(ends) - 1)
        return {
            "row": "peft",
            "seconds": round(ends[0] + (self.steps - 1) * each, 1),
            "first_step_s": round(ends[0], 1),
            "step_s": round(each, 4),
        }

    def rows(self, cases: Sequence[str]) -> Iterator[Row]:
        """Yields the rows of cases."""
        if {"sweep", "halving"} & set(cases):
            self.sweep("sweep warm-up", 2, "none")
        if "sweep" in cases:
            yield self.sweep("sweep", self.steps, "none")
        if "halving" in cases:
            yield self.sweep("halving", self.steps, "halving")
        if {"alone", "packed"} & set(cases):
            self.alone("alone warm-up", 2, 1)
            batches = [1, 2, 4] if "alone" in cases else [1]
            for batch in batches:
                yield self.alone(f"alone batch {batch}", self.steps, batch)
        if "peft" in cases:
            yield self.peft()
        if "packed" in cases:
            yield from map(self.packed, _PACKED)
        if "kernels" in cases:
            yield from kernel_rows()


_RATES = {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-2}


def _capacity(model: str) -> int:
    return 1024 if model in ANY_DEVICE else 8192


def _batches(settings: str) -> dict[str, int]:
    """Counts the batch sizes of the jobs of a resolved run file."""
    import yaml

    found = collections.Counter(
        str(job.get("batch_size", 1)) for job in yaml.safe_load(settings)["jobs"]
    )
    return dict(sorted(found.items()))


def kernel_rows(tokens: int = 1024, rank: int = 64) -> Iterator[Row]:
    """Yields packed kernels over as many calls one after the other."""
    from jaxlora.bench.kernels.benchmark import time_jax
    from jaxlora.bench.kernels.methods import FROZEN

    def medians(shape: tuple[int, int], count: int) -> dict[tuple[str, str], float]:
        k, n = shape
        groups = ((k, (n,)),)
        case = KernelCase("", count * tokens, groups, (rank,) * count, rate=0.0)
        found = time_jax(case, 12, (FROZEN, _METHOD), 0.0)
        return {(method, what): timing.median for method, what, timing in found}

    for name, shape in _WIDTHS.items():
        one = medians(shape, 1)
        for count in _KERNELS:
            many = medians(shape, count)
            row: dict[str, Any] = {"row": "kernels", "linear": name, "adapters": count}
            for what in ("forward", "both"):
                one_us, many_us = one[_METHOD, what], many[_METHOD, what]
                own = one_us - one[FROZEN, what], many_us - many[FROZEN, what]
                alone = round(count * own[0] / own[1], 2) if min(own) > 0 else None
                row |= {
                    f"{what}_us": round(many_us, 1),
                    f"{what}_speedup": round(count * one_us / many_us, 2),
                    f"{what}_adapters_alone": alone,
                }
            yield row | {"paper": _PAPER[count]}


# ---- tables --------------------------------------------------------------------------


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
        for name, row in found.items()
        if name.startswith("alone")
    }
    if alone.keys() >= {1, 2, 4}:
        alone[3] = (alone[2] + alone[4]) / 2
    for row in (sweep, halving):
        if row is None:
            continue
        batches = {int(size): count for size, count in row["batches"].items()}
        if alone.keys() >= batches.keys():
            total = sum(count * alone[size] for size, count in batches.items())
            yield _speed(row, "one at a time", total)
        if (peft := found.get("peft")) is not None:
            yield _speed(row, "peft", sum(batches.values()) * peft["seconds"])
    if sweep is not None and halving is not None:
        yield _speed(halving, "sweep", sweep["seconds"])
        yield _speed(halving, "sweep, training", sweep["training_s"], "training_s")
    rate = "steady_tokens_per_second"
    for count, one in itertools.product(_PACKED, ["alone batch 1"]):
        if f"packed {count}" in found and one in found:
            many = found[f"packed {count}"]
            ratio = round(many[rate] / found[one][rate], 2)
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
        "--cases",
        nargs="*",
        choices=CASES,
        default=CASES,
        help="without any, the tables of --output-dir are printed",
    )


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    rows = Rows(args.output_dir, "together", tables)
    if args.cases:
        end = {"model": args.model} | about(device_name())
        with tempfile.TemporaryDirectory(prefix="jaxlora-bench-") as work:
            bench = Bench(
                model=args.model, count=args.count, steps=args.steps, work=Path(work)
            )
            bench.write()
            for row in bench.rows(args.cases):
                rows.add(dict(row) | end)
    print(rows.tables())

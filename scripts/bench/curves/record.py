"""Trains the configurations of a sweep to their ends, and records their curves.

They learn to continue pieces of Python's own documentation, a token for each byte.
"""

import dataclasses
import json
import os
import pathlib
import pydoc_data.topics
import random
import signal
import time
from typing import Any

import jax

from jaxlora import Callback, LoraJob, RunConfig, Sweep, Trainer
from jaxlora.bench.report import about
from jaxlora.run.log import METRICS_FILE, read_events
from jaxlora.sweeps.configurations import varied_settings

_SAMPLE_BYTES = 63  # with the token that ends it, a block of 64 tokens
_HELD_OUT = 32  # records


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """What is trained.

    Attributes:
        count: Number of configurations.
        steps: Optimizer steps of each.
        every: Steps between two evaluations.
        slots: Configurations that train at once.
        records: Training records.
        microbatch_tokens: Tokens of a microbatch.
        seed: Random seed of the search.
        most_seconds: Time after which no configuration goes on; those that have ended
            by then are recorded. None: all go on to their ends.
    """

    count: int
    steps: int
    every: int
    slots: int
    records: int
    microbatch_tokens: int
    seed: int
    most_seconds: float | None


def write_records(path: pathlib.Path, count: int) -> None:
    """Writes pieces of the language reference that Python itself brings."""
    text = "\n".join(pydoc_data.topics.topics.values())
    text = text.encode("ascii", "ignore").decode()
    rng = random.Random(0)
    starts = rng.sample(range(len(text) // _SAMPLE_BYTES), count)
    pieces = [text[_SAMPLE_BYTES * i : _SAMPLE_BYTES * (i + 1)] for i in starts]
    path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))


SPACE: dict[str, Any] = {
    "learning_rate": {"distribution": "log_uniform_values", "min": 1e-5, "max": 3e-2},
    "rank": [4, 8, 16],
    "lora_alpha": {"times": "rank", "values": [0.5, 1, 2, 4]},
    "batch_size": [1, 2, 4, 8],
    "lr_schedule": ["constant", "linear", "cosine"],
    "warmup_ratio": [0, 0.1],
    "dropout": {"values": [0, 0.1], "probabilities": [2 / 3, 1 / 3]},
    "lora_plus_ratio": {"values": [1, 4], "probabilities": [2 / 3, 1 / 3]},
}


def run_of(what: Recording, model: pathlib.Path, work: pathlib.Path) -> RunConfig:
    """Returns the run of a recording; none of its configurations ends early."""
    data, count = work / "records.jsonl", what.records + _HELD_OUT
    write_records(data, count)
    job = LoraJob(
        name="c",
        data={"path": str(data)},  # pyrefly: ignore
        eval_fraction=_HELD_OUT / count,
        max_length=_SAMPLE_BYTES + 1,
        steps=what.steps,
        eval_every=what.every,
    )
    return RunConfig(
        model=str(model),
        output_dir=str(work / "run"),
        jobs=(job,),
        max_concurrent_jobs=what.slots,
        microbatch_tokens=what.microbatch_tokens,
        checkpoint_every=None,
        report_to=(),
        sweep=Sweep(parameters=SPACE, count=what.count, seed=what.seed, early_exit=()),  # pyrefly: ignore
    )


class _EndAt(Callback):
    """Interrupts the run after a time."""

    def __init__(self, seconds: float):
        self._until = time.monotonic() + seconds

    def on_window(self, event) -> None:
        if time.monotonic() > self._until:
            os.kill(os.getpid(), signal.SIGINT)
            self._until = float("inf")


def record(
    what: Recording, model: pathlib.Path, work: pathlib.Path, name: str
) -> dict[str, Any]:
    """Trains the configurations, and returns the curves of those that have ended.

    Args:
        what: What is trained.
        model: Folder of the base.
        work: Folder for data and run.
        name: Name of the model, for the file.
    """
    config = run_of(what, model, work)
    began = time.monotonic()
    limit = what.most_seconds
    Trainer(config).train(callbacks=[] if limit is None else [_EndAt(limit)])
    seconds = time.monotonic() - began
    events = read_events(work / "run" / METRICS_FILE)
    curves: dict[str, list[tuple[int, float]]] = {}
    ended = set()
    for event in events:
        if event["event"] == "eval":
            point = event["step"], round(event["eval_loss"], 4)
            curves.setdefault(event["job"], []).append(point)
        elif event["event"] == "job_end":
            ended.add(event["job"])
    jobs = [job for job in config.jobs if job.name in ended]
    columns = varied_settings(jobs)
    return {
        "about": about(jax.devices()[0].device_kind)
        | {"model": name, "seconds": round(seconds, 1)}
        | dataclasses.asdict(what),
        "points": list(range(0, what.steps + 1, what.every)),
        "settings": list(columns),
        "configurations": [
            {
                "settings": [column[job.name] for column in columns.values()],
                "losses": [loss for _, loss in curves.get(job.name, ())],
            }
            for job in jobs
        ],
    }

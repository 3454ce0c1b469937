"""Kinds of inputs: files in the folder of a run."""

import contextlib
import json
import os
import pathlib
import random
import signal
from collections.abc import Iterator
from unittest import mock

from jaxlora import FrozenModel, LoraJob, RunConfig, Trainer, load_model
from jaxlora.inspect import inspect_path
from jaxlora.train import control, run
from jaxlora.train.execute.job_lifecycle import JobLifecycle
from jaxlora.train.loop import Loop
from jaxlora.train.report.plot import plot_losses
from jaxlora.train.saved.export import export_checkpoint
from tests.fuzz.data_kinds import PAIRS, make_records
from tests.fuzz.kind import Kind, quiet
from tests.fuzz.model_kinds import make_model
from tests.fuzz.mutate import Damage, damage_bytes, damage_json, damage_lines


def run_config(folder: pathlib.Path) -> RunConfig:
    job = {
        "data": {"path": str(folder / "a.jsonl")},
        "rank": 2,
        "steps": 6,
        "batch_size": 2,
        "max_length": 32,
        "eval_fraction": 0.3,
        "target_modules": ["q_proj"],
    }
    return RunConfig(
        model=str(folder / "model"),
        output_dir=str(folder / "run"),
        jobs=[LoraJob(name="a", **job), LoraJob(name="b", **job)],
        max_concurrent_jobs=1,
        microbatch_tokens=256,
        block_tokens=16,
    )


@contextlib.contextmanager
def without_computing(**loop_methods) -> Iterator[None]:
    """Replaces compilation, evaluations, training steps and plots by stubs."""
    with contextlib.ExitStack() as patches:
        for name, function in loop_methods.items():
            patches.enter_context(mock.patch.object(Loop, name, function))
        for owner, name, stub in (
            (JobLifecycle, "evaluate", lambda *_: None),
            (run, "fit", lambda plan, _: plan),
            (control, "write_report", lambda *_, **__: None),
        ):
            patches.enter_context(mock.patch.object(owner, name, stub))
        yield


_MODELS: dict[pathlib.Path, FrozenModel] = {}


def train(folder: pathlib.Path, **options) -> None:
    """Opens a run's folder as training does; the base model is loaded once."""
    config = run_config(folder)
    if folder not in _MODELS:
        _MODELS[folder] = load_model(folder / "model", dtype="float32")
    Trainer(config, _MODELS[folder]).train(**options)


def make_run(folder: pathlib.Path) -> None:
    """Writes the folder of an interrupted run with a training and a waiting job."""
    make_model(folder)
    make_records("a.jsonl", PAIRS)(folder)

    def interrupt(_) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with without_computing(_train_microbatches=interrupt):
        train(folder)
    write_events(folder / "run")


def read_run(folder: pathlib.Path) -> None:
    with without_computing(_starts=lambda _: False):
        train(folder, resume=True)


def read_checkpoint(folder: pathlib.Path) -> None:
    inspect_path(str(folder / "run"), quiet())
    export_checkpoint(folder / "run", folder / "out")


EVENTS = [
    {"event": "eval", "round": 1, "job": "a", "step": 0, "eval_loss": 3.5},
    {"event": "step", "round": 1, "job": "a", "step": 1, "loss": 3.0},
    {"event": "window", "round": 1, "num_tokens": 9, "tokens_per_second": 5.0},
    {"event": "step", "round": 2, "job": "a", "step": 2, "loss": 2.5},
    {"event": "job_end", "round": 2, "job": "a", "step": 2, "status": "finished"},
]


def write_events(folder: pathlib.Path) -> None:
    text = "".join(json.dumps({**event, "time": 1.5}) + "\n" for event in EVENTS)
    (folder / "metrics.jsonl").write_text(text)


def read_metrics(folder: pathlib.Path) -> None:
    plot_losses(folder / "metrics.jsonl", folder / "losses.png")


def damage_any(content: bytes, rng: random.Random) -> Damage:
    """Changes a value if the file is JSON or JSON lines, or bytes otherwise."""
    for damage in (damage_json, damage_lines):
        try:
            return damage(content, rng)
        except ValueError:
            continue
    return damage_bytes(content, rng)


# Pipes are refused as well; they have a test of their own.
_ENTRIES = ("folder", "missing", "loop", "dangling")
KINDS = {
    "run_folder": Kind(
        make=make_run,
        targets=("run/*.txt", "run/*.json*"),
        damage=damage_any,
        read=read_run,
        num_cases=40,
        changes_folder=True,
        entries=_ENTRIES,
    ),
    "checkpoint": Kind(
        make=make_run,
        targets=("run/checkpoints/**/*",),
        damage=damage_any,
        read=read_run,
        num_cases=40,
        changes_folder=True,
        entries=_ENTRIES,
    ),
    "export": Kind(
        make=make_run,
        targets=("run/*.json*", "run/checkpoints/**/*"),
        damage=damage_any,
        read=read_checkpoint,
        num_cases=40,
        changes_folder=True,
        entries=_ENTRIES,
    ),
    "metrics": Kind(
        make=write_events,
        targets=("metrics.jsonl",),
        damage=damage_lines,
        read=read_metrics,
        num_cases=30,
    ),
}

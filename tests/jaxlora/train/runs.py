"""Settings of small runs, what may happen in them, and what they leave."""

import json
import os
import pathlib
import shutil
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import safetensors.numpy

import jaxlora
from jaxlora import (
    Callback,
    FrozenModel,
    LoraJob,
    RunConfig,
    Trainer,
    load_model,
    merge_adapter,
)
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.data.tokens.tokenized_data import TokenizedData
from jaxlora.models.options import DecoderOptions
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linear_shapes, tensor_specs
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.plan.job.chosen_modules import choose_modules
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import PreparedJob, prepare_jobs
from jaxlora.plan.memory.footprint import StageUse
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.plan.resolve import resolve
from jaxlora.plan.run_plan import RunPlan
from jaxlora.run.log import read_events
from jaxlora.train.job_state import JobState
from jaxlora.train.open_run import start_job
from tests import tiny

# ---- the base ------------------------------------------------------------------------


def write_base(folder: pathlib.Path, config: dict[str, Any]) -> pathlib.Path:
    """Writes a model of any family with random weights, and the tiny tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    rng, weights = np.random.default_rng(0), {}
    specs = tensor_specs(model_config(config))
    for spec in (part for whole in specs for part in whole.parts):
        size = 0.2 if len(spec.hf_shape) == 1 else spec.hf_shape[1] ** -0.5
        if spec.hf_name.endswith(".bias"):
            size = 0.01  # else all tokens are alike, and some expert gets none
        middle = float(spec.hf_name.endswith(("scale", "layer_scalar")))
        noise = middle + size * rng.normal(size=spec.hf_shape)
        weights[spec.hf_name] = noise.astype(np.float32)
    safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tiny.write_tokenizer(folder)
    return folder


# ---- settings ------------------------------------------------------------------------

# One linear of attention and one of the MLP. All seven take twice as long to trace and
# to compile; test_peft_run.py trains them, and some that share an input.
LINEARS = r".*\.(q|down)_proj"

# One shape of two slots. Runs that have it share programs, whose tracing and compiling
# takes far longer than to train a tiny model.
TWO_SLOTS = {
    "max_concurrent_jobs": 2,
    "slot_rank": 8,
    "slot_targets": LINEARS,
    "slot_dropout": True,
    "microbatch_tokens": 512,
    "block_tokens": 16,
}


def run_of(
    model: FrozenModel, folder: pathlib.Path, jobs: Sequence[LoraJob], **settings: Any
) -> RunConfig:
    """Returns the settings of a run of jobs."""
    own = {"model": str(model.folder), "output_dir": str(folder), "jobs": tuple(jobs)}
    return RunConfig(**own | settings)


def two_slots(
    model: FrozenModel, folder: pathlib.Path, jobs: Sequence[LoraJob], **settings: Any
) -> RunConfig:
    """Returns the settings of a run whose programs many tests share."""
    return run_of(model, folder, jobs, **TWO_SLOTS | settings)


def one_slot(
    model: FrozenModel, folder: pathlib.Path, jobs: Sequence[LoraJob], **settings: Any
) -> RunConfig:
    """Returns the settings of a run whose jobs never share a microbatch."""
    own = {"max_concurrent_jobs": 1, "window_steps": 2}
    return two_slots(model, folder, jobs, **own | settings)


def write_swept_job(folder: pathlib.Path) -> LoraJob:
    """Writes data for eight steps of one whole microbatch each; returns the job.

    In a sweep over it, configurations never share a microbatch.
    """
    rng = np.random.default_rng(0)
    texts = ("".join(rng.choice(list("ab "), 15)) for _ in range(32))  # and an end
    records = ({"text": text} for text in texts)
    return LoraJob(
        name="c",
        data={"path": tiny.write_jsonl(folder / "records.jsonl", records)},
        eval_fraction=0.25,
        rank=4,
        target_modules=["q_proj"],
        batch_size=8,
        steps=8,
        lr_schedule="constant",
        dropout=0.1,
        max_length=48,
    )


# ---- plans and their parts -----------------------------------------------------------


def plan_jobs(
    config: RunConfig, model: FrozenModel, jobs: Sequence[PreparedJob]
) -> RunPlan:
    """Plans a run of jobs that are prepared, as the trainer does."""
    return resolve(config, PlannedModel.of(config, model), jobs, this_machine())


def plan_and_jobs(
    config: RunConfig, model: FrozenModel
) -> tuple[RunPlan, list[JobState]]:
    """Plans a run, and starts its jobs."""
    reader = DataReader(load_tokenizer(model.folder))
    chosen = [choose_modules(job, model.config) for job in config.jobs]
    jobs = prepare_jobs(config.jobs, chosen, model.config, reader)
    return plan_jobs(config, model, jobs), [start_job(job, model) for job in jobs]


def prepared_of(**values: Any) -> PreparedJob:
    """A prepared job of which only these values are read."""
    prepared = object.__new__(PreparedJob)
    for name, value in values.items():
        object.__setattr__(prepared, name, value)
    return prepared


def samples_of(lengths: Sequence[int]) -> list[TokenizedSample]:
    """Samples of so many tokens, all of which are learned."""
    return [
        TokenizedSample(token_ids=np.zeros(n, np.int32), is_target=np.ones(n, bool))
        for n in lengths
    ]


def data_of(
    samples: Sequence[TokenizedSample], max_length: int, **more: Any
) -> TokenizedData:
    """Data that hold samples, none of which was cut or dropped."""
    return TokenizedData(
        source="none",
        samples=samples,
        max_length=max_length,
        num_records=len(samples),
        num_truncated=0,
        num_dropped=0,
        num_without_target=0,
        **more,
    )


def tiny_spec(adapted: Sequence[str], **slots: Any) -> DecoderSpec:
    """The tiny model with two slots of rank 4 on some linears."""
    shape = {"num_slots": 2, "rank": 4} | slots
    return DecoderSpec(
        config=model_config(tiny.CONFIG),
        options=DecoderOptions(dtype=np.dtype("float32"), max_segment_tokens=16),
        slots=SlotShape(**shape),
        adapted=tuple(adapted),
    )


# A stage that is the whole model, on one device.
ONE_STAGE = StageUse(num_shards=1, num_parts=1, num_kept=1, num_waiting=0)


# ---- what happens in a run -----------------------------------------------------------


class AtWindow(Callback):
    """Calls a function with the trainer after each window."""

    def __init__(self, call: Callable[[Trainer], None]):
        self._call = call

    def on_window(self, event) -> None:
        self._call(self.trainer)


class InterruptAt(Callback):
    """Interrupts the run once, as Ctrl-C does, where a window ends with a round."""

    def __init__(self, number: int, also: Callable[[Trainer], None] = lambda t: None):
        self._number, self._also = number, also
        self._is_done = False

    def on_window(self, event) -> None:
        if event.round >= self._number and not self._is_done:
            self._is_done = True
            self._also(self.trainer)
            os.kill(os.getpid(), signal.SIGINT)


class Copies(Callback):
    """Copies the folder of a run at each checkpoint, as a kill would leave it."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self.copies: list[pathlib.Path] = []

    def on_checkpoint(self, event) -> None:
        target = self._folder / f"{len(self.copies)}"
        unfinished = shutil.ignore_patterns("*tmp*", "*.lock")
        shutil.copytree(self.trainer.output_dir, target, ignore=unfinished)
        self.copies.append(target)


class Killed(BaseException):
    """Ends a run as a kill would: nothing is written any more."""


# ---- what a run leaves ---------------------------------------------------------------


class Outcome:
    """A run's adapters, its events, and the losses of every step and evaluation."""

    def __init__(self, trainer: Trainer, result):
        self.trainer, self.result = trainer, result
        self.folder = result.output_dir
        self.progress = {job.name: job.progress for job in result.jobs}
        self.adapters = {
            job.name: self.adapter(job.name).modules
            for job in result.jobs
            if job.folder
        }
        written = adapter_bytes(self.folder)
        self.bytes = {name: written[name] for name in self.adapters}
        self.events = read_events(self.folder / "metrics.jsonl")
        self.losses = self._values("step", "loss")
        self.norms = self._values("step", "grad_norm")
        self.evals = self._values("eval", "eval_loss")

    def adapter(self, name: str) -> jaxlora.Adapter:
        """Returns the adapter that a job has exported."""
        config = self.trainer.model.config
        shapes, size = linear_shapes(config), config.hidden_size
        return import_peft(self.folder / "adapters" / name, shapes, score_size=size)

    def of(self, *kinds: str, job: str | None = None) -> list[dict]:
        """Returns the events of some kinds, of all jobs or of one."""
        mine = [e for e in self.events if job in (None, e.get("job"))]
        return [e for e in mine if not kinds or e["event"] in kinds]

    def _values(self, kind: str, key: str) -> dict[str, list[float]]:
        return {n: [e[key] for e in self.of(kind, job=n)] for n in self.progress}


def outcome(
    config: RunConfig,
    model: FrozenModel | None = None,
    *,
    on_window: Callable[[Trainer], None] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
) -> Outcome:
    """Trains a run, on a model that is loaded or on that of its settings."""
    trainer = Trainer(config, model)
    if on_window is not None:
        callbacks = [*callbacks, AtWindow(on_window)]
    return Outcome(trainer, trainer.train(callbacks=callbacks, resume=resume))


def trained_tensors(
    config: RunConfig, model: FrozenModel | None = None, *, stop: bool = False
) -> dict[str, dict[str, np.ndarray]]:
    """Trains a run, and may interrupt and resume it; returns the tensors by job."""
    if stop:
        assert Trainer(config, model).train(callbacks=[InterruptAt(1)]).interrupted
    Trainer(config, model).train(resume=stop)
    bits = adapter_bytes(config.output_dir)
    return {name: safetensors.numpy.load(one) for name, one in bits.items()}


def adapter_bytes(folder: str | pathlib.Path) -> dict[str, bytes]:
    """Returns the weights that a run has exported, by job."""
    paths = pathlib.Path(folder, "adapters").glob("*/adapter_model.safetensors")
    return {path.parent.name: path.read_bytes() for path in paths}


def events_of(folder: str | pathlib.Path, *kinds: str) -> list[dict]:
    """Returns the events of a run, of all kinds or of some."""
    events = read_events(pathlib.Path(folder, "metrics.jsonl"))
    return [event for event in events if not kinds or event["event"] in kinds]


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns the bytes of all files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_same_bits(one: Outcome, other: Outcome) -> None:
    """Checks that two runs have the same weights, losses and norms."""
    assert one.bytes == other.bytes
    for kind in ("losses", "norms", "evals"):
        assert getattr(one, kind) == getattr(other, kind), kind


def assert_generates_alike(model: FrozenModel, folder, out) -> FrozenModel:
    """Checks that a base with an adapter generates what the merged model does.

    Returns the merged model, which is written into a folder.
    """
    merged = load_model(merge_adapter(model.folder, folder, out), dtype="float32")
    texts = ["Abc", "xyz and so on"]
    given = jaxlora.generate(model, texts, adapters=[folder], max_new_tokens=6)
    wanted = jaxlora.generate(merged, texts, max_new_tokens=6)
    for one, other in zip(given, wanted, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    return merged

"""Measures how much jobs that train together differ from the same jobs alone.

The jobs differ in data, rank, targets, learning rate and batch size, and all have
dropout. They train together, and then each of them trains alone twice: in the same
layout, where the rows of the others stay empty, and in the layout that the job has by
itself. The model has random weights, unless --model names a folder.

Prints a table of differences. With --output-dir, writes together.csv.

    jaxlora bench together
    jaxlora bench together --model llama-3.2-1b --output-dir bench
"""

import argparse
import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxlora import FrozenModel, LoraJob, RunConfig, Trainer, load_model
from jaxlora.bench import byte_data
from jaxlora.bench.options import add_output_dir, make_parser
from jaxlora.bench.report import about, markdown, write_csv
from jaxlora.bench.shapes import MODELS, config_json
from jaxlora.bench.weights import random_base
from jaxlora.data import pack as data_pack
from jaxlora.data.pack import PackedBatch, pack_microbatch
from jaxlora.hf.config import model_config
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.run.log import METRICS_FILE, read_events

Columns = dict[str, Any]
Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
LAYOUTS = ("same", "other")
_TARGETS = ("all-linear", ("q_proj", "v_proj"), ("down_proj", "o_proj"), "all-linear")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of a job.

    Attributes:
        losses: Training loss of each step, in nats per target token.
        eval_losses: Loss of each evaluation.
        weights: Tensors of the adapter by their names in PEFT.
    """

    losses: list[float]
    eval_losses: list[float]
    weights: dict[str, np.ndarray]


def make_jobs(count: int, steps: int, folder: Path) -> list[LoraJob]:
    """Makes jobs that differ in all settings that affect layout, and in rates."""
    return [
        LoraJob(
            name=f"job{i}",
            data={
                "path": byte_data.write_records(folder / f"{i}.jsonl", 40 + 9 * i, i)
            },
            eval_fraction=0.2,
            rank=(4, 8, 2, 16)[i],
            dropout=(0.1, 0.3, 0.05, 0.2)[i],
            target_modules=_TARGETS[i],
            batch_size=(8, 6, 12, 10)[i],
            steps=steps,
            learning_rate=(1e-3, 3e-4, 2e-3, 1e-3)[i],
            lr_schedule="constant",
            max_length=128,
            seed=i,
            eval_every=max(1, steps // 2),
        )
        for i in range(count)
    ]


def make_model(model: str, dtype: Dtype, folder: Path) -> FrozenModel:
    """Loads a checkpoint, or makes random weights with a byte-level tokenizer."""
    if model not in MODELS:
        return load_model(model, dtype=dtype)
    config = model_config(config_json(model))
    byte_data.write_tokenizer(folder)
    options = DecoderOptions(dtype=jnp.dtype(dtype), max_segment_tokens=1)
    shapes = DecoderSpec(config=config, options=options).base_shapes()
    return FrozenModel(
        config=config,
        params=random_base(shapes),
        dtype=jnp.dtype(dtype),
        folder=folder,
        source=model,
        fingerprint=f"random {model}",
    )


class Comparison:
    """Trains jobs in one dtype of the base, together and alone."""

    def __init__(
        self, model: FrozenModel, jobs: Sequence[LoraJob], folder: Path, tokens: int
    ):
        self._model, self._jobs, self._folder = model, jobs, folder
        self._tokens = tokens
        self._count = itertools.count()

    def train(self, jobs: Sequence[LoraJob]) -> dict[str, Trained]:
        """Trains jobs together, with slots for all jobs so that programs are reused."""
        run = RunConfig(
            model=self._model.source,
            output_dir=str(self._folder / str(next(self._count))),
            jobs=tuple(jobs),
            max_concurrent_jobs=len(self._jobs),
            slot_rank=max(job.rank for job in self._jobs),
            slot_targets="all-linear",
            slot_dropout=True,
            microbatch_tokens=self._tokens,
            checkpoint_every=None,
        )
        result = Trainer(run, self._model).train()
        events = read_events(result.output_dir / METRICS_FILE)
        return {job.name: _trained(job.name, result.output_dir, events) for job in jobs}

    def rows(self) -> Iterator[Columns]:
        """Yields the largest differences over all jobs, for each layout."""
        together = self.train(self._jobs)
        for layout in LAYOUTS:
            alone = {}
            for slot, job in enumerate(self._jobs):
                if layout == "same":
                    with only(slot):
                        alone[job.name] = self.train(self._jobs)[job.name]
                else:
                    alone |= self.train([job])
            found = [differences(together[name], alone[name]) for name in together]
            worst = {key: max(pair[key] for pair in found) for key in found[0]}
            yield {"dtype": self._model.dtype.name, "layout": layout} | worst


@contextlib.contextmanager
def only(slot: int) -> Iterator[None]:
    """Leaves the rows of all other slots empty in every microbatch."""

    def pack(microbatch, batches, limits) -> PackedBatch:
        packed: Any = pack_microbatch(microbatch, batches, limits)
        is_other = packed.block_adapter != slot
        rows = np.repeat(is_other, limits.block_tokens)
        return dataclasses.replace(
            packed,
            token_ids=np.where(rows, 0, packed.token_ids),
            segment_ids=np.where(rows, -1, packed.segment_ids),
            loss_weight=np.where(rows, np.float32(0), packed.loss_weight),
            block_adapter=np.where(is_other, -1, packed.block_adapter),
        )

    with mock.patch.object(data_pack, "pack_microbatch", pack):
        yield


def _trained(name: str, folder: Path, events: Sequence[dict]) -> Trained:
    file = folder / "adapters" / name / "adapter_model.safetensors"
    mine = [event for event in events if event.get("job") == name]
    return Trained(
        losses=[e["loss"] for e in mine if e["event"] == "step"],
        eval_losses=[e["eval_loss"] for e in mine if e["event"] == "eval"],
        weights=safetensors.numpy.load_file(file),
    )


def differences(one: Trained, other: Trained) -> dict[str, float]:
    """Computes the largest relative differences of a loss and of a tensor's norm."""

    def largest(ours: Sequence[float], theirs: Sequence[float]) -> float:
        return max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))

    def relative(name: str) -> float:
        a, b = one.weights[name], other.weights[name]
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    return {
        "loss": largest(one.losses, other.losses),
        "eval_loss": largest(one.eval_losses, other.eval_losses),
        "weights": max(map(relative, one.weights)),
    }


def table(rows: Sequence[Columns]) -> str:
    """Formats a line for each dtype and layout; 0 means equal to the bit."""
    numbers = ("loss", "eval_loss", "weights")
    lines = [
        [
            row["dtype"],
            row["layout"],
            *(f"{row[n]:.1e}" if row[n] else 0 for n in numbers),
        ]
        for row in rows
    ]
    return markdown(("base", "layout", "step loss", "eval loss", "weights"), lines)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    out = make_parser("together", __doc__)
    add_output_dir(out)
    out.add_argument(
        "--model", default="tiny", help=f"{', '.join(MODELS)}, or a folder"
    )
    out.add_argument("--jobs", type=int, choices=(2, 3, 4), default=3)
    out.add_argument("--steps", type=int, default=12, help="of each job")
    out.add_argument("--microbatch-tokens", type=int, default=512)
    out.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    return out


def measure(args: argparse.Namespace) -> Iterator[Columns]:
    """Yields the row of each dtype and layout."""
    with tempfile.TemporaryDirectory() as scratch:
        jobs = make_jobs(args.jobs, args.steps, Path(scratch))
        for dtype in args.dtypes:
            folder = Path(scratch) / dtype
            folder.mkdir()
            model = make_model(args.model, dtype, folder)
            tokens = args.microbatch_tokens
            yield from Comparison(model, jobs, folder / "runs", tokens).rows()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark with the given options."""
    args = parser().parse_args(argv)
    settings = {"model": args.model, "jobs": args.jobs, "steps": args.steps}
    end = about(jax.devices()[0].device_kind)
    rows = [settings | row | end for row in measure(args)]
    print("largest relative differences of training alone from training together\n")
    print(table(rows))
    if args.output_dir:
        write_csv(args.output_dir / "together.csv", rows)

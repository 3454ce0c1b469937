"""Measures how much jobs that train together differ from the same jobs alone.

    python -m scripts.alone_and_together
    python -m scripts.alone_and_together --model llama-3.2-1b --csv together.csv

Jobs that differ in data, rank, targets, rate and batch size, all with dropout, train
together, and each of them alone: once in the same layout, where the rows of the others
stay empty, and once in the layout that the job has by itself. The model's weights are
random; a folder may be named instead.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import rich.box
import safetensors.numpy
from rich.console import Console
from rich.table import Table

from jaxlora import BaseModel, LoraJob, RunConfig, Trainer, load_model
from jaxlora.data.pack import PackedBatch, pack_microbatch
from jaxlora.hf.config import model_config
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.train import feed
from jaxlora.train.run_log import METRICS_FILE, read_events
from scripts.bench_models import MODELS, config_json, random_base
from scripts.bench_report import about, write_csv
from tests import tiny

Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
LAYOUTS = ("same", "other")
_TARGETS = ("all-linear", ("q_proj", "v_proj"), ("down_proj", "o_proj"), "all-linear")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a job.

    Attributes:
        losses: Training loss of each step, in nats per target token.
        eval_losses: Loss of each evaluation.
        weights: Tensors of the adapter, by PEFT's names.
    """

    losses: list[float]
    eval_losses: list[float]
    weights: dict[str, np.ndarray]


def make_jobs(count: int, steps: int, folder: Path) -> list[LoraJob]:
    """Makes jobs that differ in all settings that affect layout, and in rates."""
    return [
        LoraJob(
            name=f"job{i}",
            data={"path": tiny.write_records(folder / f"{i}.jsonl", 40 + 9 * i, i)},
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


def make_model(model: str, dtype: Dtype, folder: Path) -> BaseModel:
    """Loads a checkpoint, or makes random weights with a byte-level tokenizer."""
    if model not in MODELS:
        return load_model(model, dtype=dtype)
    config = model_config(config_json(model))
    tiny.write_tokenizer(folder)
    options = DecoderOptions(dtype=jnp.dtype(dtype), max_segment_tokens=1)
    shapes = DecoderSpec(config=config, options=options).base_shapes()
    return BaseModel(
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
        self, model: BaseModel, jobs: Sequence[LoraJob], folder: Path, tokens: int
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

    def rows(self) -> Iterator[dict[str, Any]]:
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
            apart = [differences(together[name], alone[name]) for name in together]
            worst = {key: max(one[key] for one in apart) for key in apart[0]}
            yield {"dtype": self._model.dtype.name, "layout": layout} | worst


@contextlib.contextmanager
def only(slot: int) -> Iterator[None]:
    """In this context, only one slot's rows of a microbatch are filled."""

    def pack(microbatch, batches, limits) -> PackedBatch:
        packed = jax.device_get(pack_microbatch(microbatch, batches, limits))
        gone = packed.block_adapter != slot
        rows = np.repeat(gone, limits.block_tokens)
        alone = dataclasses.replace(
            packed,
            token_ids=np.where(rows, 0, packed.token_ids),
            segment_ids=np.where(rows, -1, packed.segment_ids),
            loss_weight=np.where(rows, np.float32(0), packed.loss_weight),
            block_adapter=np.where(gone, -1, packed.block_adapter),
        )
        return jax.device_put(alone)

    with mock.patch.object(feed, "pack_microbatch", pack):
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


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a row for each dtype and layout; 0 means bitwise equal."""
    table = Table(
        title="alone against together: largest relative differences",
        title_justify="left",
        box=rich.box.SIMPLE_HEAD,
    )
    for column in ("base", "layout", "step loss", "eval loss", "weights"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        numbers = (row[key] for key in ("loss", "eval_loss", "weights"))
        shown = (f"{n:.1e}" if n else "0" for n in numbers)
        table.add_row(row["dtype"], row["layout"], *shown)
    Console().print(table)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument(
        "--model", default="tiny", help=f"{', '.join(MODELS)}, or a folder"
    )
    out.add_argument("--jobs", type=int, choices=(2, 3, 4), default=3)
    out.add_argument("--steps", type=int, default=12, help="of each job")
    out.add_argument("--microbatch-tokens", type=int, default=512)
    out.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    out.add_argument("--csv", type=Path, help="file to write")
    return out


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Prints the table, writes it if asked, and returns its rows."""
    args = parser().parse_args(argv)
    rows: list[dict[str, Any]] = []
    settings = {"model": args.model, "jobs": args.jobs, "steps": args.steps}
    end = about(jax.devices()[0].device_kind)
    with tempfile.TemporaryDirectory() as scratch:
        jobs = make_jobs(args.jobs, args.steps, Path(scratch))
        for dtype in args.dtypes:
            folder = Path(scratch) / dtype
            folder.mkdir()
            model = make_model(args.model, dtype, folder)
            tokens = args.microbatch_tokens
            for row in Comparison(model, jobs, folder / "runs", tokens).rows():
                rows.append(settings | row | end)
                print(json.dumps(row), flush=True)
    print_table(rows)
    if args.csv is not None:
        write_csv(args.csv, rows)
    return rows


if __name__ == "__main__":
    main()

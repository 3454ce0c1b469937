"""Times functions with LoRA as XLA compiles them, and through `jaxlora.fuse`.

The programs know nothing of jaxlora: a linear, four adapters, and a decoder layer in
plain JAX. All times are device times of the forward and backward pass, as CUPTI counts
them, with the predictions of `jaxlora.explain` beside them.

Prints a table. With --output-dir, writes fuse.jsonl and fuse.md. Needs a GPU.

    jaxlora bench fuse --output-dir bench
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import jaxlora
from jaxlora.bench.fuse.programs import PROGRAMS, Program
from jaxlora.bench.report import (
    Rows,
    about,
    add_output_dir,
    device_times,
    require_gpu,
    table,
)
from jaxlora.fuse.predict.cost import Cost, graph_cost
from jaxlora.fuse.predict.graph import data_flow
from jaxlora.fuse.predict.kernel_rates import describe_device

WAYS = ("original", "fused")


class Prediction(NamedTuple):
    """Predicted costs of a training step."""

    original: Cost  # as XLA compiles it
    fused: Cost  # with the fused sites in the kernels
    sites: int  # number of sites that are fused


def predict(program: Program) -> Prediction:
    """Predicts the costs of a program's step on the present device."""
    explained = jaxlora.explain(program.function, *program.arguments)
    arguments = jax.eval_shape(program.step_arguments)
    step = jax.make_jaxpr(program.step(program.function))(*arguments)
    original = graph_cost(data_flow(step), describe_device())
    saved = explained.training_before + explained.training_after * -1.0
    return Prediction(
        original=original, fused=original + saved * -1.0, sites=explained.num_fused
    )


def steps(program: Program) -> dict[str, Callable[..., Any]]:
    """Returns the compiled steps of a program, by the way in which they run."""
    fused = jaxlora.fuse(program.function, strict=True)
    functions = program.function, fused
    return {
        way: jax.jit(program.step(function))
        for way, function in zip(WAYS, functions, strict=True)
    }


def time_program(program: Program, repeats: int) -> dict[str, Any]:
    """Times both ways of a program; returns a row."""
    predicted, arguments = predict(program), program.step_arguments()
    times = {
        way: statistics.median(device_times(step, *arguments, repeats=repeats))
        for way, step in steps(program).items()
    }
    original, fused = (times[way] for way in WAYS)
    expected = 1e6 * predicted.original.seconds, 1e6 * predicted.fused.seconds
    return {
        "program": program.name,
        "sites": predicted.sites,
        "original_us": round(original, 1),
        "fused_us": round(fused, 1),
        "speedup": round(original / fused, 3),
        "predicted_original_us": round(expected[0], 1),
        "predicted_fused_us": round(expected[1], 1),
        "original_error": f"{expected[0] / original - 1:+.0%}",
        "fused_error": f"{expected[1] / fused - 1:+.0%}",
        "predicted_original_mb": round(predicted.original.num_bytes / 1e6),
        "predicted_fused_mb": round(predicted.fused.num_bytes / 1e6),
    }


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    out.add_argument("--programs", nargs="*", choices=PROGRAMS, default=[*PROGRAMS])
    out.add_argument("--repeats", type=int, default=10)


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    require_gpu("fuse")
    end = about(jax.devices()[0].device_kind)
    rows = Rows(args.output_dir, "fuse", table)
    for name in args.programs:
        rows.add(time_program(PROGRAMS[name](), args.repeats) | end)
    print(rows.tables())

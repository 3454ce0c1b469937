"""Times functions with LoRA as XLA compiles them, and through `jaxlora.fuse`.

The programs know nothing of jaxlora: a linear, four adapters, a decoder layer in plain
JAX, and a training step of tunix's Llama 3 with qwix's LoRA, if both are installed.
All times are device times of the forward and backward pass, as CUPTI counts them, with
the predictions of `jaxlora.explain` beside them. `--traffic` also counts the bytes with
Nsight Compute.

Prints a table. With --output-dir, writes fuse.csv. Needs a GPU.

    jaxlora bench fuse --output-dir bench
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import jaxlora
from jaxlora.bench.fuse.programs import PROGRAMS, Program, unavailable
from jaxlora.bench.options import add_output_dir, make_parser
from jaxlora.bench.report import (
    about,
    device_times,
    dicts_table,
    require_gpu,
    write_csv,
)
from jaxlora.fuse.cost import Cost, graph_cost
from jaxlora.fuse.graph import data_flow
from jaxlora.fuse.kernel_rates import describe_device
from jaxlora.profile.dram_traffic import dram_bytes

FOREIGN = ("decoder", "decoder-plain")
WAYS = ("original", "fused")
CALLS = (1, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted costs of a training step.

    Attributes:
        original: As XLA compiles it.
        fused: With the fused sites in the kernels.
        sites: Number of sites that are fused.
    """

    original: Cost
    fused: Cost
    sites: int


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


def run_calls(name: str, way: str, calls: int) -> None:
    """Runs a program's step `calls` times, in the process that is watched."""
    program = PROGRAMS[name]()
    step, arguments = steps(program)[way], program.step_arguments()
    for _ in range(calls):
        jax.block_until_ready(step(*arguments))


def traffic(name: str) -> dict[str, int]:
    """Counts the bytes that each way of a program moves; returns columns of a row."""
    columns = {}
    for way in WAYS:
        command = [sys.executable, "-m", "jaxlora.bench.fuse.benchmark"]
        command += ["--programs", name, "--run", way]
        few, many = (dram_bytes([*command, "--calls", str(calls)]) for calls in CALLS)
        columns[f"{way}_mb"] = round((many - few) / (CALLS[1] - CALLS[0]) / 1e6)
    return columns


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    out = make_parser("fuse", __doc__)
    add_output_dir(out)
    out.add_argument("--programs", nargs="*", choices=PROGRAMS, default=[*PROGRAMS])
    out.add_argument("--repeats", type=int, default=10)
    out.add_argument("--traffic", action="store_true", help="needs ncu")
    out.add_argument("--run", choices=WAYS, help=argparse.SUPPRESS)
    out.add_argument("--calls", type=int, help=argparse.SUPPRESS)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark with the given options."""
    args = parser().parse_args(argv)
    if args.run:
        run_calls(args.programs[0], args.run, args.calls)
        return
    require_gpu("fuse")
    rows = []
    for row in _rows(args):
        rows.append(row | about(jax.devices()[0].device_kind))
        print(row, flush=True)
        if args.output_dir:
            write_csv(args.output_dir / "fuse.csv", rows)
    if rows:
        fields = [field for field in rows[0] if field not in about("")]
        print(dicts_table(rows, fields))


def _rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in args.programs:
        if name in FOREIGN and (reason := unavailable()) is not None:
            print(f"{name} is left out: {reason}")
            continue
        row = time_program(PROGRAMS[name](), args.repeats)
        yield row | (traffic(name) if args.traffic else {})


if __name__ == "__main__":
    main()

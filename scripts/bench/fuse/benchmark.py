"""Times functions with LoRA as XLA compiles them, and through `jaxlora.fuse`.

The programs know nothing of jaxlora: a linear, four adapters, and layers of a decoder
in plain JAX. Their ways:

    original  as XLA compiles them
    fused     through `jaxlora.fuse`, as the prediction decides
    measured  with --measure-seconds: through `jaxlora.fuse(..., measure_seconds=...)`
    own       the library's own layers of the same sizes, with masks of their own

All times are device times of the forward and backward pass, as CUPTI counts them, with
what `jaxlora.explain` predicts that the kernels save.

Prints tables. With --output-dir, writes fuse.jsonl and fuse.md, and what
`jaxlora.explain` says of measured linears. Needs a GPU.

    python -m scripts.bench fuse --output-dir bench
    python -m scripts.bench fuse --programs layer --measure-seconds 60
    python -m scripts.bench fuse --programs --pass-layers 80
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import jaxlora
from jaxlora.pallas_kernels import compile_program
from scripts.bench.fuse.own import own_layers
from scripts.bench.fuse.programs import PROGRAMS, Program, Shape, abstract, decoder
from scripts.bench.kernel_times import (
    Call,
    by_kind,
    measure_calls,
    median_kernels,
    ranked,
    total,
)
from scripts.bench.report import (
    Row,
    Rows,
    about,
    add_output_dir,
    pivot,
    require_gpu,
    sections,
    table,
)

ORIGINAL, FUSED, MEASURED, OWN = WAYS = ("original", "fused", "measured", "own")
# The least known ways come first, in case that the time is up.
_ORDER = (MEASURED, OWN, ORIGINAL, FUSED)
_COLUMNS = (
    "program", "way", "sites", "us", "speedup", "over_own", "saved_us",
    "predicted_saved_us",
    "explain_seconds", "trace_seconds", "compile_seconds",
)  # fmt: skip
_PASS_COLUMNS = ("program", "layers", "trace_seconds", "pass_seconds")


def make(name: str, way: str, measure_seconds: float | None) -> Program:
    """Makes a program, or the same in another way."""
    found = PROGRAMS[name]
    if way == OWN:
        assert isinstance(found, Shape)
        return own_layers(found)
    return replaced(found(), way, measure_seconds)


def replaced(
    program: Program, way: str, measure_seconds: float | None = None
) -> Program:
    """Returns a program with its function fused, or as it is."""
    if way == ORIGINAL:
        return program
    if way == FUSED:
        return program.with_function(jaxlora.fuse(program.function, strict=True))
    # Where XLA is faster everywhere, nothing is fused.
    fused = jaxlora.fuse(program.function, measure_seconds=measure_seconds)
    return program.with_function(fused)


def flat_step(program: Program) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step as a function of a flat list of arrays, and these arrays."""
    leaves, tree = jax.tree.flatten(program.step_arguments())
    step = program.step(program.function)

    def run(*leaves):
        return jax.tree.leaves(step(*jax.tree.unflatten(tree, leaves)))

    return jax.jit(run, compiler_options=program.options or None), tuple(leaves)


def time_program(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each way of a program, and then again after all rounds."""
    ways = []
    for way in ways_of(name, args):
        ways.append(compile_way(name, way, args))
        ways[-1].measure(args.repeats)
        yield ways[-1].row()
    # The clock of a device at its power limit depends on what ran before, so the ways
    # take turns.
    for _ in range(args.rounds - 1):
        for one in ways:
            one.measure(args.repeats)
    yield from (one.row() for one in ways)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A program that is compiled in one way.

    Attributes:
        columns: Columns of its row that are known before it is timed.
        compiled: The program.
        leaves: Its arguments.
        calls: The calls that were timed.
    """

    columns: dict[str, Any]
    compiled: jax.stages.Compiled
    leaves: tuple[Any, ...]
    calls: list[Call] = dataclasses.field(default_factory=list)

    def measure(self, repeats: int) -> None:
        """Times some calls more."""
        self.calls.extend(measure_calls(self.compiled, self.leaves, repeats))

    def row(self) -> dict[str, Any]:
        """Returns its row, with the median of all calls."""
        kernels, row = median_kernels(self.calls), {**self.columns}
        row["us"] = round(statistics.median(map(total, self.calls)), 1)
        listed = [[name, n, round(us, 1)] for name, n, us in ranked(kernels)]
        return row | {"kinds": by_kind(kernels), "kernels": listed}


def compile_way(name: str, way: str, args: argparse.Namespace) -> Way:
    """Compiles a program in one way; linears are measured here."""
    program = make(name, way, args.measure_seconds)
    row: dict[str, Any] = {"program": program.name, "way": way}
    if way in (FUSED, MEASURED):
        row |= _explained(name, program, way, args)
    run, leaves = flat_step(program)
    start = time.perf_counter()
    lowered = run.lower(*leaves)
    traced = time.perf_counter()
    compiled = compile_program(lowered)
    ended = time.perf_counter()
    row["trace_seconds"] = round(traced - start, 1)
    row["compile_seconds"] = round(ended - traced, 1)
    return Way(columns=row, compiled=compiled, leaves=leaves)


def _explained(
    name: str, program: Program, way: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Returns columns of the prediction; writes what is said of measured linears."""
    start = time.perf_counter()
    explained = jaxlora.explain(program.function, *program.arguments)
    seconds = time.perf_counter() - start
    if way == MEASURED:
        print(explained, file=sys.stderr, flush=True)
        if args.output_dir is not None:
            (args.output_dir / f"{name}.txt").write_text(f"{explained}\n")
    return {
        "sites": explained.num_fused,
        # Linears are measured here, once for this function.
        "explain_seconds": round(seconds, 1),
        "predicted_saved_us": round(
            1e6 * (explained.before.seconds - explained.after.seconds), 1
        ),
    }


def pass_row(layers: int) -> dict[str, Any]:
    """Times the fusion pass on a decoder whose layers are not in a loop."""
    program = abstract(lambda: decoder("decoder, unrolled", rate=0.1, layers=layers))
    start = time.process_time()
    jax.eval_shape(program.function, *program.arguments)
    traced = time.process_time()
    fused = jaxlora.fuse(program.function, strict=True)
    jax.eval_shape(fused, *program.arguments)
    ended = time.process_time()
    return {
        "program": program.name,
        "way": "pass",
        "layers": layers,
        "trace_seconds": round(traced - start, 2),
        "pass_seconds": round(ended - traced, 2),
    }


def tables(rows: Sequence[Row]) -> str:
    """Formats times, and the milliseconds of each kind of kernels."""
    last = {(row["program"], row["way"]): row for row in rows}
    timed = [with_ratios(row, last) for row in last.values() if "us" in row]
    kinds = [
        {"kernels, us": kind, "way": f"{row['program']}, {row['way']}", "us": us}
        for row in timed
        for kind, us in row["kinds"].items()
    ]
    passes = [row for row in rows if row["way"] == "pass"]
    made = {
        "Times": table(timed, _COLUMNS),
        "Kinds of kernels": pivot(kinds, ["kernels, us"], "way", "us"),
        "The pass, in seconds of a processor": table(passes, _PASS_COLUMNS),
    }
    return sections(made)


def with_ratios(row: Row, rows: Any) -> dict[str, Any]:
    """Adds the speed and time saved over the original, and the time over own layers."""
    us = {way: rows.get((row["program"], way), {}).get("us") for way in WAYS}
    speedup = round(us[ORIGINAL] / row["us"], 3) if us[ORIGINAL] else None
    over_own = round(row["us"] / us[OWN], 3) if us[OWN] else None
    saved = round(us[ORIGINAL] - row["us"], 1) if us[ORIGINAL] else None
    return {**row, "speedup": speedup, "over_own": over_own, "saved_us": saved}


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    default = ["linear", "plain", "adapters", "layer"]
    out.add_argument("--programs", nargs="*", choices=PROGRAMS, default=default)
    out.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    out.add_argument(
        "--measure-seconds",
        type=float,
        help="time to spend on measuring the linears of each program",
    )
    out.add_argument(
        "--pass-layers",
        type=int,
        nargs="*",
        default=[],
        help="also time the fusion pass on decoders with these numbers of layers",
    )
    out.add_argument("--repeats", type=int, default=10, help="calls of a round")
    out.add_argument("--rounds", type=int, default=3, help="in which ways take turns")


def ways_of(name: str, args: argparse.Namespace) -> list[str]:
    """Returns the ways in which a program is timed."""
    is_made = {
        MEASURED: args.measure_seconds is not None,
        OWN: isinstance(PROGRAMS[name], Shape),
    }
    return [way for way in _ORDER if way in args.ways and is_made.get(way, True)]


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    require_gpu("fuse")
    end = about(jax.devices()[0].device_kind)
    rows = Rows(args.output_dir, "fuse", tables)
    for name in args.programs:
        for row in time_program(name, args):
            rows.add(dict(row) | end)
    for layers in args.pass_layers:
        rows.add(pass_row(layers) | end)
    print(rows.tables())

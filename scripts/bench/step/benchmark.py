"""Times whole training steps, against peft and against the base alone.

A step is a few microbatches, forward and backward, and the optimizer step of every
adapter. It is timed from the end of the step before, and the device never waits for the
host. Weights and tokens are random. All rows get the same tokens, and each runs in a
process of its own so that it has its own peak memory.

Prints a table for each model. With --output-dir, writes steps.csv and steps.png, and
with --profile also breakdown.csv and breakdown.png. Needs a GPU, except for the models
tiny and wide-2; torch, transformers and peft are optional.

    jaxlora bench step --output-dir bench
    jaxlora bench step --models llama-3.2-1b --layers 4 --adapters 1 4 32
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxlora.bench.options import add_output_dir, add_training_options, make_parser
from jaxlora.bench.report import about, markdown, write_csv
from jaxlora.bench.shapes import LARGE, MODELS
from jaxlora.bench.step.cases import FROZEN, PEER, ROWS, Case
from jaxlora.bench.step.plots import plot_parts, plot_steps

Columns = dict[str, Any]

# Memory is counted, so it must not be reserved ahead. Compile times are reported, so
# every row compiles anew.
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit)\b")


def reason(lines: Sequence[str]) -> str:
    """Returns the line of a failed process that says why; JAX prints a trace after it.

    Args:
        lines: The last lines that the process wrote to stderr.
    """
    named = [line for line in lines if _ERROR.match(line)]
    return (named or lines)[-1][:300] if lines else ""


def measure_alone(case: Case, timeout: float, turn: str) -> Columns:
    """Measures a row in a process of its own; `skipped` says why a row failed.

    Args:
        case: The row.
        timeout: Time limit in seconds. Waiting for a turn does not count.
        turn: Lock file. Rows with the same file use the device one after the other.
    """
    module = "jaxlora.bench.step.measure"
    described = json.dumps(dataclasses.asdict(case))
    out = subprocess.run(
        [sys.executable, "-m", module, described, turn, str(timeout)],
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    if out.returncode == -signal.SIGALRM:
        return {"skipped": f"it took more than {timeout:g} s"}
    if out.returncode:
        lines = [line for line in out.stderr.splitlines() if line.strip()]
        print(*lines[-12:], sep="\n", file=sys.stderr)
        return {"skipped": reason(lines) or f"exit {out.returncode}"}
    if case.profile:
        print(out.stderr, file=sys.stderr)
    return json.loads(out.stdout.splitlines()[-1])


def cases(args: argparse.Namespace) -> list[Case]:
    """Returns all rows. Those without several adapters appear once for each model."""
    return [
        _case(args, model, row, num_jobs)
        for model in args.models
        for number, num_jobs in enumerate(args.adapters)
        for row in args.rows
        if number == 0 or _has_several(row)
    ]


def _case(args: argparse.Namespace, model: str, row: str, num_jobs: int) -> Case:
    return Case(
        model=model,
        row=row,
        num_layers=args.layers,
        num_jobs=num_jobs,
        rank=args.rank,
        dropout=args.dropout,
        capacity=args.microbatch_tokens,
        num_microbatches=args.microbatches,
        block_tokens=args.block_tokens,
        median_tokens=args.median_tokens,
        longest_tokens=args.longest_tokens,
        dtype=args.dtype,
        attention=args.attention,
        capability=args.capability,
        repeats=args.repeats,
        profile=args.profile and ROWS[row].library == "jaxlora",
    )


def _has_several(row: str) -> bool:
    return ROWS[row].library == "jaxlora" and ROWS[row].has_adapters


def _described(case: Case) -> Columns:
    """Returns the columns that identify a row."""
    row = ROWS[case.row]
    adapters = 0 if not row.has_adapters else case.num_jobs
    return {
        "model": case.model,
        "layers": "all" if case.num_layers is None else case.num_layers,
        "row": case.row,
        "adapters": min(1, adapters) if row.library == "torch" else adapters,
        "rank": case.rank,
        "dropout": case.dropout,
        "dtype": case.dtype,
        "microbatches": case.num_microbatches,
        "microbatch_tokens": case.capacity,
        "triton_code": "device" if case.capability is None else case.capability / 10,
    }


def add_ratios(rows: Sequence[Columns]) -> None:
    """Adds time over the base alone, and speed over peft, to the rows of each model."""

    def speed(model: str, name: str) -> float | None:
        named = (r for r in rows if (r["model"], r["row"]) == (model, name))
        return next((r.get("tokens_per_second") for r in named), None)

    for row in rows:
        own = row.get("tokens_per_second")
        frozen, peer = (speed(row["model"], name) for name in (FROZEN, PEER))
        row["time_over_adapters_off"] = frozen and own and round(frozen / own, 3)
        row["speed_over_peft"] = peer and own and round(own / peer, 3)


def _print(row: Columns) -> None:
    name = f"{row['model']} {row['row']}, {row['adapters']} adapters"
    if "skipped" in row:
        print(f"{name:48} skipped: {row['skipped']}", flush=True)
        return
    memory = row["peak_gib"] or row["program_gib"]
    print(
        f"{name:48} {row['tokens_per_second']:8} tokens/s {row['step_ms']:9} ms "
        f"{memory or '?':>7} GiB, compiled in {row.get('compile_seconds', 0)} s",
        flush=True,
    )


def steps_table(rows: Sequence[Columns]) -> str:
    """Formats the rows of each model as a table; skipped rows say why."""
    head = ("row", "adapters", "tokens/s", "ms", "over the base alone", "peak GiB")
    tables = []
    for model in dict.fromkeys(row["model"] for row in rows):
        lines = [_table_line(row) for row in rows if row["model"] == model]
        tables.append(f"{model}:\n\n{markdown(head, lines)}")
    return "\n\n".join(tables)


def _table_line(row: Columns) -> list[object]:
    name = [row["row"], row["adapters"]]
    if "skipped" in row:
        return [*name, f"skipped: {row['skipped']}", "", "", ""]
    ratio, memory = row["time_over_adapters_off"], row["peak_gib"]
    blank = lambda value: "" if value is None else value
    speed = f"{row['tokens_per_second']:,}"
    return [*name, speed, row["step_ms"], blank(ratio), blank(memory)]


def parts_table(parts: Sequence[Columns]) -> str:
    """Formats the milliseconds of each part as a table with a column for each row."""
    named = lambda p: f"{p['model']}, {p['row']}, {p['adapters']} adapters"
    columns = list(dict.fromkeys(map(named, parts)))
    ms = {(named(p), p["part"]): p["ms"] for p in parts}
    kinds = dict.fromkeys(p["part"] for p in parts)
    lines = [[kind, *(ms.get((c, kind), "") for c in columns)] for kind in kinds]
    return markdown(["part, ms", *columns], lines)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    out = make_parser("step", __doc__)
    add_output_dir(out)
    out.add_argument("--models", nargs="+", choices=MODELS, default=[LARGE])
    add_training_options(out)
    out.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    out.add_argument("--adapters", type=int, nargs="+", default=[4])
    out.add_argument("--microbatches", type=int, default=1, help="in a step")
    out.add_argument("--median-tokens", type=int, default=600, help="in a sample")
    out.add_argument("--repeats", type=int, default=10)
    out.add_argument(
        "--capability",
        type=int,
        help="ten times the compute capability for which Triton compiles, such as 80; "
        "by default the device's",
    )
    out.add_argument("--profile", action="store_true", help="split the time into parts")
    out.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="rows that compile at the same time. Their weights must fit together. "
        "Rows run one by one, but the tuning of another row may disturb one",
    )
    out.add_argument(
        "--timeout",
        type=float,
        default=900,
        help="seconds for a row, without the time that it waits for other rows",
    )
    return out


def measured(
    some: Sequence[Case], args: argparse.Namespace
) -> Iterator[tuple[Case, Columns]]:
    """Yields each row with its results, in the given order."""
    with (
        tempfile.NamedTemporaryFile() as turn,
        ThreadPoolExecutor(args.at_once) as pool,
    ):
        one = functools.partial(measure_alone, timeout=args.timeout, turn=turn.name)
        yield from zip(some, pool.map(one, some), strict=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark with the given options."""
    args = parser().parse_args(argv)
    rows: list[Columns] = []
    parts: list[Columns] = []
    for case, found in measured(cases(args), args):
        described = _described(case)
        end = about(found.pop("device", ""))
        for part, milliseconds in found.pop("parts", {}).items():
            parts.append({**described, "part": part, "ms": milliseconds, **end})
        rows.append(described | found | end)
        _print(rows[-1])
        add_ratios(rows)
        # Files are written after every row, so that an interrupted run keeps its rows.
        if args.output_dir:
            write_csv(args.output_dir / "steps.csv", rows)
            if parts:
                write_csv(args.output_dir / "breakdown.csv", parts)
    print(steps_table(rows))
    if parts:
        print(f"\n{parts_table(parts)}")
    if args.output_dir:
        plot_steps(rows, args.output_dir / "steps.png")
        if parts:
            plot_parts(parts, args.output_dir / "breakdown.png")

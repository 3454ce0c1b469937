"""Times whole training steps, against peft and against the base alone.

A step is a few microbatches, forward and backward, and the optimizer step of every
adapter. It is timed from the end of the step before, and the device never waits for the
host. Weights and tokens are random. All rows get the same tokens, and each runs in a
process of its own so that it has its own peak memory.

Prints a table for each model. With --output-dir, writes step.jsonl and step.md. Needs a
GPU, except for the models tiny and wide-2; torch, transformers and peft are optional.

    python -m scripts.bench step --output-dir bench
    python -m scripts.bench step --models llama-3.2-1b --layers 4 --adapters 1 4 32
"""

import argparse
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

from scripts.bench.report import (
    Row,
    Rows,
    about,
    add_output_dir,
    add_training_options,
    pivot,
    shared_fields,
    table,
)
from scripts.bench.shapes import LARGE, MODELS
from scripts.bench.step.cases import FROZEN, PEER, ROWS, Case

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
    module = "scripts.bench.step.measure"
    out = subprocess.run(
        [sys.executable, "-m", module, case.to_json(), turn, str(timeout)],
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


def _case(args: argparse.Namespace, model: str, row: str, adapters: int) -> Case:
    given = shared_fields(Case, args)
    given |= {"model": model, "row": row, "adapters": adapters}
    given["profile"] = args.profile and ROWS[row].library == "jaxlora"
    return Case(**given)


def _has_several(row: str) -> bool:
    return ROWS[row].library == "jaxlora" and ROWS[row].has_adapters


def _described(case: Case) -> Columns:
    """Returns the columns that identify a row."""
    row = ROWS[case.row]
    adapters = 0 if not row.has_adapters else case.adapters
    return {
        "model": case.model,
        "layers": "all" if case.layers is None else case.layers,
        "row": case.row,
        "adapters": min(1, adapters) if row.library == "torch" else adapters,
        "rank": case.rank,
        "dropout": case.dropout,
        "dtype": case.dtype,
        "microbatches": case.microbatches,
        "microbatch_tokens": case.microbatch_tokens,
    }


def with_ratios(rows: Sequence[Row]) -> list[Columns]:
    """Adds ratios to rows of equal settings; the last row of a name counts.

    - `over_frozen`: the time over that of the base alone.
    - `over_peer`: the speed over that of peft.
    """

    speeds = {row["row"]: row.get("tokens_per_second") for row in rows}
    frozen, peer = speeds.get(FROZEN), speeds.get(PEER)
    out = []
    for row in rows:
        own = row.get("tokens_per_second")
        over_frozen = round(frozen / own, 3) if frozen and own else None
        over_peer = round(own / peer, 3) if peer and own else None
        out.append({**row, "over_frozen": over_frozen, "over_peer": over_peer})
    return out


_COLUMNS = (
    "row", "adapters", "tokens_per_second", "step_ms", "over_frozen", "over_peer",
    "peak_gib", "program_gib", "compile_seconds", "skipped",
)  # fmt: skip


# Columns that must be equal in rows that are compared with each other.
_SETTINGS = (
    "model", "layers", "rank", "dropout", "dtype", "microbatches", "microbatch_tokens",
)  # fmt: skip


def tables(rows: Sequence[Row]) -> str:
    """Formats the rows of equal settings, and the parts of their steps, as tables."""
    made = []
    settings = lambda row: {name: row.get(name) for name in _SETTINGS}
    for same in {str(settings(row)): settings(row) for row in rows}.values():
        own = with_ratios([row for row in rows if settings(row) == same])
        made.append(", ".join(f"{name} {value}" for name, value in same.items()))
        made.append(table(own, _COLUMNS))
        parts = [
            {
                "part, ms": part,
                "row": f"{row['row']}, {row['adapters']} adapters",
                "ms": ms,
            }
            for row in own
            for part, ms in row.get("parts", {}).items()
        ]
        made += [pivot(parts, ["part, ms"], "row", "ms")] if parts else []
    return "\n\n".join(made)


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    out.add_argument("--models", nargs="+", choices=MODELS, default=[LARGE])
    add_training_options(out)
    out.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    out.add_argument("--adapters", type=int, nargs="+", default=[4])
    out.add_argument("--microbatches", type=int, default=1, help="in a step")
    out.add_argument("--median-tokens", type=int, default=600, help="in a sample")
    out.add_argument("--repeats", type=int, default=10)
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


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    rows = Rows(args.output_dir, "step", tables)
    for case, found in measured(cases(args), args):
        rows.add(_described(case) | found | about(found.get("device", "")))
    print(rows.tables())

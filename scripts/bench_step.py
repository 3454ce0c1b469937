"""Times whole training steps on the present GPU, against peft and the base alone.

A step is a few microbatches, forward and backward, and the optimiser step of every
adapter; its time is that from the end of the step before, with the device never waiting
for the host. Weights and tokens are random; every row gets the same tokens and runs in
a process of its own, so that each has its own peak of memory. Writes steps.csv and
steps.png; with --profile, breakdown.csv and breakdown.png as well.

    python -m scripts.bench_step --output-dir bench
    python -m scripts.bench_step --models llama-3.2-1b --layers 4 --adapters 1 4 32
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
from pathlib import Path
from typing import Any

from scripts.bench_report import about, write_csv
from scripts.bench_step_plots import plot_parts, plot_steps
from scripts.bench_step_rows import FROZEN, PEER, ROWS, Case

# Memory is counted, not reserved; and every row compiles anew, whose time is reported.
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit)\b")


def reason(lines: Sequence[str]) -> str:
    """Which of a failed process' last lines says why; JAX puts a trace behind it."""
    named = [line for line in lines if _ERROR.match(line)]
    return (named or lines)[-1][:300] if lines else ""


def measure_alone(case: Case, timeout: float, turn: str) -> dict[str, Any]:
    """Measures a row in a process of its own; `skipped` says what went wrong there.

    Args:
        case: The row.
        timeout: In seconds, waits for a turn not counted.
        turn: A file; rows with the same one use the device one after the other.
    """
    words = json.dumps(dataclasses.asdict(case))
    out = subprocess.run(
        [sys.executable, "-m", "scripts.bench_step_rows", words, turn, str(timeout)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
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
    """All rows; those without several adapters only once."""
    out = []
    for model in args.models:
        for number, num_jobs in enumerate(args.adapters):
            for row in args.rows:
                if number and not _has_several(row):
                    continue
                case = Case(
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
                    repeats=args.repeats,
                    profile=args.profile and ROWS[row].library == "jaxlora",
                )
                out.append(case)
    return out


def _has_several(row: str) -> bool:
    return ROWS[row].library == "jaxlora" and ROWS[row].has_adapters


def _described(case: Case) -> dict[str, Any]:
    """The columns that say what a row is."""
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
    }


def with_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Adds time over the base alone, and speed over peft, to the rows of each model."""

    def speed(model: str, name: str) -> float | None:
        named = (r for r in rows if (r["model"], r["row"]) == (model, name))
        return next((r.get("tokens_per_second") for r in named), None)

    for row in rows:
        own = row.get("tokens_per_second")
        frozen, peer = (speed(row["model"], name) for name in (FROZEN, PEER))
        row["time_over_adapters_off"] = frozen and own and round(frozen / own, 3)
        row["speed_over_peft"] = peer and own and round(own / peer, 3)


def _print(row: dict[str, Any]) -> None:
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


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    from scripts.bench_models import MODELS

    out.add_argument("--output-dir", type=Path, default=Path("bench"))
    out.add_argument("--models", nargs="+", choices=MODELS, default=["llama-3.1-8b"])
    out.add_argument("--layers", type=int, help="instead of the model's own")
    out.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    out.add_argument("--adapters", type=int, nargs="+", default=[4])
    out.add_argument("--rank", type=int, default=16)
    out.add_argument("--dropout", type=float, default=0.1)
    out.add_argument("--microbatches", type=int, default=1, help="of a step")
    out.add_argument("--microbatch-tokens", type=int, default=8192)
    out.add_argument("--block-tokens", type=int, default=64)
    out.add_argument("--median-tokens", type=int, default=600)
    out.add_argument("--longest-tokens", type=int, default=2048)
    out.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    out.add_argument("--attention", choices=["auto", "cudnn", "xla"], default="auto")
    out.add_argument("--repeats", type=int, default=10)
    out.add_argument("--profile", action="store_true")
    out.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="rows that compile beside each other, for which their weights must fit; "
        "each runs alone but for the tuning of others' products",
    )
    out.add_argument(
        "--timeout",
        type=float,
        default=900,
        help="seconds for a row, without those that it waits for the rows beside it",
    )
    return out


def measured(
    some: Sequence[Case], args: argparse.Namespace
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """What was found of each row, in their order."""
    with (
        tempfile.NamedTemporaryFile() as turn,
        ThreadPoolExecutor(args.at_once) as pool,
    ):
        one = functools.partial(measure_alone, timeout=args.timeout, turn=turn.name)
        yield from zip(some, pool.map(one, some), strict=True)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    rows: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for case, found in measured(cases(args), args):
        described = _described(case)
        end = about(found.pop("device", ""))
        for part, milliseconds in found.pop("parts", {}).items():
            parts.append({**described, "part": part, "ms": milliseconds, **end})
        rows.append(described | found | end)
        _print(rows[-1])
        with_ratios(rows)
        # After every row: a run that is cut short keeps what it has.
        write_csv(args.output_dir / "steps.csv", rows)
        if parts:
            write_csv(args.output_dir / "breakdown.csv", parts)
    plot_steps(rows, args.output_dir / "steps.png")
    if parts:
        plot_parts(parts, args.output_dir / "breakdown.png")


if __name__ == "__main__":
    main()

"""Times LoRA linears on an NVIDIA GPU, as ratios to the frozen layer through cuBLAS.

All times are device times: the sum of a call's kernels as CUPTI counts them. The frozen
layer is `y = x W` and `dx = dy W'`; everything else also
returns the gradients of A and B. All methods of a case run in one process.

A few calls end before the device reaches its power limit. `--sustained` also calls each
method back to back for some seconds, and reports wall time at the clock that is left.

Prints a table of ratios. With --output-dir, writes kernels.jsonl and kernels.md.

    python -m scripts.bench kernels --output-dir bench
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from scripts.bench.kernel_times import device_times
from scripts.bench.kernels.methods import (
    FROZEN,
    METHODS,
    call,
    operands,
    prepared,
    unsupported,
)
from scripts.bench.report import (
    Row,
    Rows,
    Timing,
    about,
    add_output_dir,
    pivot,
    require_gpu,
)
from scripts.bench.shapes import KERNEL_CASES, KernelCase

Timed = tuple[str, str, Timing]  # method, pass, timing

ROUNDS = 3  # each method's calls are spread over the run because clocks drift with heat
_AT_ONCE = 20  # calls that are queued before the host waits


def time_jax(
    case: KernelCase, repeats: int, methods: Sequence[str], seconds: float
) -> Iterator[Timed]:
    """Times JAX methods; the name of the pass says whether a time is sustained."""
    groups, block_adapter = operands(case)
    runs: dict[tuple[str, str], tuple] = {}  # functions with their arguments
    for name in methods:
        inputs = prepared(name, groups), block_adapter
        for what in ("forward", "both"):
            run = jax.jit(call(name, with_gradient=what == "both"))
            runs[name, what] = run, *inputs
    repeats_a_round = -(-repeats // ROUNDS)
    cool = lambda run, *args: device_times(run, *args, repeats=repeats_a_round)
    for (name, what), found in _in_rounds(runs, cool).items():
        yield name, what, Timing.of(found)
    if not seconds:
        return
    busy = lambda *run: [sustained(functools.partial(*run), seconds / ROUNDS)]
    for (name, what), found in _in_rounds(runs, busy).items():
        yield name, f"{what}, sustained", Timing.of(found)


def _in_rounds[Key](
    runs: dict[Key, tuple], measure: Callable[..., list[float]]
) -> dict[Key, list[float]]:
    times: dict[Key, list[float]] = {key: [] for key in runs}
    for _ in range(ROUNDS):
        for key, run in runs.items():
            times[key] += measure(*run)
    return times


def sustained(run: Callable[[], object], seconds: float) -> float:
    """Returns the microseconds of a call, from `seconds` of calls back to back."""
    began, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        jax.block_until_ready([run() for _ in range(_AT_ONCE)][-1])
        calls += _AT_ONCE
    return 1e6 * passed / calls


def with_ratios(timings: Sequence[Timed]) -> Iterator[dict[str, Any]]:
    """Yields rows of a case, with ratios to the frozen layer's median of the same pass.

    A ratio is None without a frozen layer.
    """
    frozen = {what: t.median for method, what, t in timings if method == FROZEN}
    for method, what, timing in timings:
        base = frozen.get(what)
        ratio = round(timing.median / base, 3) if base else None
        columns = timing.columns("median_us", 1)
        yield {"method": method, "pass": what, **columns, "ratio": ratio}


def ratios_table(rows: Sequence[Row]) -> str:
    """Formats ratios of forward and backward, with a line for each case.

    The column of the frozen layer holds its microseconds.
    """

    def cell(row: Row) -> str:
        is_frozen, ratio = row["method"] == FROZEN, row["ratio"]
        return f"{row['median_us']} us" if is_frozen or ratio is None else str(ratio)

    both = (row for row in rows if row["pass"].startswith("both"))
    shown = [
        {
            "time over the frozen layer": row["case"],
            "column": row["method"] + row["pass"].removeprefix("both"),
            "cell": cell(row),
        }
        for row in both
    ]
    return pivot(shown, ["time over the frozen layer"], "column", "cell")


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    out.add_argument("--repeats", type=int, default=20)
    out.add_argument(
        "--sustained", type=float, default=0.0, help="seconds", metavar="SECONDS"
    )
    listed = "; ".join(f"{i}: {case.name}" for i, case in enumerate(KERNEL_CASES))
    out.add_argument(
        "--cases",
        type=int,
        nargs="*",
        choices=range(len(KERNEL_CASES)),
        default=range(len(KERNEL_CASES)),
        help=f"indices, by default all ({listed})",
        metavar="I",
    )
    out.add_argument(
        "--methods",
        nargs="*",
        choices=METHODS,
        default=list(METHODS),
        help=f"those that cannot run here are left out; there are no ratios without "
        f"{FROZEN!r}",
    )


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    require_gpu("kernels")
    end = about(jax.devices()[0].device_kind)
    rows = Rows(args.output_dir, "kernels", ratios_table)
    for case in (KERNEL_CASES[i] for i in args.cases):
        for row in time_case(case, args):
            rows.add(row | end)
    print(rows.tables())


def time_case(
    case: KernelCase, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Times the methods that can run a case; yields a row for each pass of each."""
    methods = []
    for method in options.methods:
        if (reason := unsupported(method, case)) is None:
            methods.append(method)
        else:
            print(f"{method} is left out: {reason}")
    timings = list(time_jax(case, options.repeats, methods, options.sustained))
    for row in with_ratios(timings):
        yield {"case": case.name, **row}

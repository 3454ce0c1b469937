"""Times LoRA linears on an NVIDIA GPU, as ratios to the frozen layer through cuBLAS.

All times are device times: the sum of a call's kernels as CUPTI counts them, or CUDA
events for torch. The frozen layer is `y = x W` and `dx = dy W'`; everything else also
returns the gradients of A and B. All methods of a case run in one process.

The product of the Triton kernels differs from cuBLAS's, so their times are also given
as ratios to "frozen Triton", the same product without adapters. `--capability 80`
compiles these kernels as for an A100 on a newer GPU. That ratio is then an estimate of
the ratio there, and the other ratios are not.

A few calls end before the device reaches its power limit. `--sustained` also calls each
method back to back for some seconds, and reports wall time at the clock that is left.

Prints a table of ratios. With --output-dir, writes kernels.csv and kernels.png. The
package torch is optional.

    jaxlora bench kernels --output-dir bench
"""

import argparse
import contextlib
import functools
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from jaxlora.bench.kernels import peers
from jaxlora.bench.kernels.methods import (
    FROZEN,
    METHODS,
    OWN_FROZEN,
    call,
    operands,
    prepared,
    unsupported,
)
from jaxlora.bench.options import add_output_dir, make_parser
from jaxlora.bench.report import (
    COLOURS,
    HATCHES,
    Timing,
    about,
    device_of,
    device_times,
    markdown,
    require_gpu,
    write_csv,
)
from jaxlora.bench.shapes import KERNEL_CASES, KernelCase
from jaxlora.pallas_kernels.triton.target import forced_capability

Columns = dict[str, Any]
Timed = tuple[str, str, Timing]  # method, pass, timing

ROUNDS = 3  # each method's calls are spread over the run because clocks drift with heat
_MOST_SHOWN = 3.0  # ratio at which the picture ends
_CLIPPED: dict[str, Any] = {
    "fontsize": 6,
    "ha": "right",
    "va": "center",
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.4},
}
_AT_ONCE = 20  # calls that are queued before the host waits


def time_jax(
    case: KernelCase, repeats: int, methods: Sequence[str], seconds: float
) -> Iterator[Timed]:
    """Times JAX methods; the name of the pass says whether a time is sustained."""
    groups, routing = operands(case)
    runs: dict[tuple[str, str], tuple] = {}  # functions with their arguments
    for name in methods:
        inputs = prepared(name, groups), routing
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


def time_torch(case: KernelCase, repeats: int) -> Iterator[Timed]:
    """Times torch methods by CUDA events."""
    import torch

    for name, what, run in peers.calls(case):
        times = []
        for i in range(repeats + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if i >= 3:
                times.append(1000 * start.elapsed_time(end))
        yield name, what, Timing.of(times)


def ratios(
    timings: Iterable[Timed], frozen: Callable[[str], str | None] = lambda _: FROZEN
) -> list[float | None]:
    """Divides medians by a frozen layer's in the same pass; None without one.

    Args:
        timings: All timings of a case.
        frozen: Returns the method by which to divide a method's times.
    """
    timings = list(timings)
    medians = {(method, what): t.median for method, what, t in timings}
    bases = (medians.get((frozen(method) or "", what)) for method, what, _ in timings)
    return [
        round(t.median / base, 3) if base else None
        for base, (_, _, t) in zip(bases, timings, strict=True)
    ]


def ratios_table(rows: Sequence[Columns]) -> str:
    """Formats ratios of forward and backward, with a line for each case.

    The column of the frozen layer holds its microseconds. A ratio to a method's own
    frozen product is in parentheses.
    """
    both = [row for row in rows if row["pass"].startswith("both")]
    name = lambda row: row["method"] + row["pass"].removeprefix("both")
    columns = list(dict.fromkeys(map(name, both)))
    shown: dict[tuple[str, str], object] = {}
    for row in both:
        is_frozen, ratio = row["method"] == FROZEN, row["ratio"]
        cell = f"{row['median_us']} us" if is_frozen or ratio is None else ratio
        if row.get("own_ratio"):
            cell = f"{cell} ({row['own_ratio']} of its own)"
        shown[row["case"], name(row)] = cell
    cases = dict.fromkeys(row["case"] for row in both)
    lines = [[case, *(shown.get((case, c), "") for c in columns)] for case in cases]
    return markdown(["time over the frozen layer", *columns], lines)


def plot(rows: list[Columns], path: Path) -> None:
    """Draws ratios of forward and backward as bars, by case and method.

    Rows without a ratio have no bar. Without any ratio, no file is written.
    """
    both = [row for row in rows if row["pass"] == "both" and row["ratio"] is not None]
    if not both:
        return
    cases = list(dict.fromkeys(row["case"] for row in both))
    methods = list(dict.fromkeys(row["method"] for row in both))
    ratios = {(row["case"], row["method"]): row["ratio"] for row in both}
    # One row of the picture for each bar, and one between two cases.
    bars = [(case, m) for case in cases for m in methods if (case, m) in ratios]
    place = {bar: i + cases.index(bar[0]) for i, bar in enumerate(bars)}
    height = 0.13 * (len(bars) + len(cases)) + 1.5
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    for i, method in enumerate(methods):
        mine = {place[bar]: ratios[bar] for bar in bars if bar[1] == method}
        style = {
            "color": COLOURS[i % len(COLOURS)],
            "hatch": HATCHES[i // len(COLOURS)],
            "edgecolor": "white",
        }
        shown = [min(ratio, _MOST_SHOWN) for ratio in mine.values()]
        axes.barh(list(mine), shown, 1.0, label=method, linewidth=0.3, **style)
        for y, ratio in mine.items():
            if ratio > _MOST_SHOWN:
                axes.text(_MOST_SHOWN - 0.02, y, f"{ratio:.1f} \u2192", **_CLIPPED)
    middles = [np.mean([y for bar, y in place.items() if bar[0] == c]) for c in cases]
    axes.set_yticks(middles, cases)
    axes.set_xlabel(
        f"time / frozen layer, forward + backward (bars with an arrow go beyond "
        f"{_MOST_SHOWN:g})"
    )
    axes.set_xlim(0, _MOST_SHOWN)
    axes.axvline(1, color="black", linewidth=0.5)
    axes.invert_yaxis()
    axes.set_title(f"LoRA layers on {device_of(both)}", fontsize=10)
    figure.legend(fontsize=7, ncols=3, loc="outside upper center")
    figure.savefig(path, dpi=150)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    out = make_parser("kernels", __doc__)
    add_output_dir(out)
    out.add_argument("--repeats", type=int, default=20)
    out.add_argument(
        "--sustained", type=float, default=0.0, help="seconds", metavar="SECONDS"
    )
    out.add_argument("--no-torch", action="store_true")
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
    out.add_argument(
        "--capability",
        type=int,
        help="ten times the compute capability for which Triton compiles, such as 80; "
        "by default the device's",
    )
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark with the given options."""
    args = parser().parse_args(argv)
    require_gpu("kernels")
    with_torch = not args.no_torch and importlib.util.find_spec("torch") is not None
    if not args.no_torch and not with_torch:
        print("torch's methods are left out: torch is not installed")
    end = about(jax.devices()[0].device_kind)
    if args.capability:
        end["device"] += f", Triton code for {args.capability / 10}"
    rows: list[Columns] = []
    with contextlib.ExitStack() as stack:
        if args.capability:
            stack.enter_context(forced_capability(args.capability))
        for case in (KERNEL_CASES[i] for i in args.cases):
            for row in time_case(case, args, with_torch=with_torch):
                rows.append(row | end)
                _print(rows[-1])
    print(ratios_table(rows))
    if args.output_dir:
        write_csv(args.output_dir / "kernels.csv", rows)
        plot(rows, args.output_dir / "kernels.png")


def time_case(
    case: KernelCase, options: argparse.Namespace, *, with_torch: bool
) -> Iterator[Columns]:
    """Times the methods that can run a case; returns a row for each pass of each."""
    methods = []
    for method in options.methods:
        if (reason := unsupported(method, case)) is None:
            methods.append(method)
        else:
            print(f"{method} is left out: {reason}")
    timings = list(time_jax(case, options.repeats, methods, options.sustained))
    if with_torch:
        timings += time_torch(case, options.repeats)
    all_ratios = zip(ratios(timings), ratios(timings, OWN_FROZEN.get), strict=True)
    for timed, (ratio, own_ratio) in zip(timings, all_ratios, strict=True):
        yield _row(case, timed, ratio) | {"own_ratio": own_ratio}


def _row(case: KernelCase, timed: Timed, ratio: float | None) -> Columns:
    method, what, timing = timed
    return {
        "case": case.name,
        "method": method,
        "pass": what,
        "median_us": round(timing.median, 1),
        "p10_us": round(timing.p10, 1),
        "p90_us": round(timing.p90, 1),
        "ratio": ratio,
    }


def _print(row: Columns) -> None:
    print(
        f"{row['case']:42} {row['method']:30} {row['pass']:18} {row['median_us']:9} us "
        f"{'' if row['ratio'] is None else row['ratio']:6} "
        f"{'' if row['own_ratio'] is None else row['own_ratio']:6}",
        flush=True,
    )

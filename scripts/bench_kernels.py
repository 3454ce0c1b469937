"""Times LoRA linears on the present GPU, as ratios to the frozen layer through cuBLAS.

Every figure is device time: the sum of a call's kernels as CUPTI counts them, or CUDA
events for torch. The frozen layer is `y = x W` and `dx = dy W'`; everything else also
returns the gradients of A and B. All methods of a case run in one process.

A few calls are over before the device reaches its power limit; `--sustained` also runs
each method for so many seconds on end, and takes wall time, at the clock that is left.

    python -m scripts.bench_kernels --output-dir bench
"""

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from scripts.bench_cases import CASES, METHODS, Case, arrays, call
from scripts.bench_report import Timing, about, device_times, write_csv

FROZEN = "frozen"  # the method that ratios are over
ROUNDS = 3  # each method's calls are spread over the run: clocks drift with heat
_AT_ONCE = 20  # calls that the device is given before the host waits


def time_jax(
    case: Case, repeats: int, methods: Sequence[str], seconds: float
) -> Iterator[tuple[str, str, Timing]]:
    """(method, pass, timing) of JAX methods; the pass says if a time is sustained."""
    names = [(name, what) for name in methods for what in ("forward", "both")]
    groups, routing = arrays(case)
    runs = {
        (name, what): jax.jit(call(name, routing, with_gradient=what == "both"))
        for name, what in names
    }
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(ROUNDS):
        for key, run in runs.items():
            times[key] += device_times(run, groups, repeats=-(-repeats // ROUNDS))
    for (name, what), found in times.items():
        yield name, what, Timing.of(found)
    if not seconds:
        return
    for key in times:
        times[key] = []
    for _ in range(ROUNDS):
        for key, run in runs.items():
            times[key].append(sustained(run, groups, seconds / ROUNDS))
    for (name, what), found in times.items():
        yield name, f"{what}, sustained", Timing.of(found)


def sustained(run: Callable, groups: list, seconds: float) -> float:
    """Microseconds a call, over so many seconds of calls back to back."""
    began, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        jax.block_until_ready([run(groups) for _ in range(_AT_ONCE)][-1])
        calls += _AT_ONCE
    return 1e6 * passed / calls


def time_torch(case: Case, repeats: int) -> Iterator[tuple[str, str, Timing]]:
    """(method, pass, timing) of what torch users run, by CUDA events."""
    import torch

    from scripts import bench_torch

    for name, what, run in bench_torch.calls(case):
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


def ratios(timings: Iterable[tuple[str, str, Timing]]) -> list[float | None]:
    """Each median over that of the frozen layer in the same pass, None without one."""
    timings = list(timings)
    base = {what: t.median for method, what, t in timings if method == FROZEN}
    return [
        round(t.median / base[what], 3) if what in base else None
        for _, what, t in timings
    ]


def plot(rows: list[dict], path: Path) -> None:
    """Bars of the ratio of forward and backward, by case and method.

    Rows without a ratio have no bar; without any there is no plot.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    both = [row for row in rows if row["pass"] == "both" and row["ratio"] is not None]
    if not both:
        return
    cases = list(dict.fromkeys(row["case"] for row in both))
    methods = list(dict.fromkeys(row["method"] for row in both))
    height = 0.8 / len(methods)
    figure, axes = plt.subplots(figsize=(9, 0.8 * len(cases) + 1.5))
    for i, method in enumerate(methods):
        found = {row["case"]: row["ratio"] for row in both if row["method"] == method}
        at = [j + i * height for j, case in enumerate(cases) if case in found]
        axes.barh(at, [found[c] for c in cases if c in found], height, label=method)
    axes.set_yticks(np.arange(len(cases)) + 0.4, cases)
    axes.set_xlabel("time / frozen layer, forward + backward")
    axes.set_xlim(0, 3)
    axes.axvline(1, color="black", linewidth=0.5)
    axes.invert_yaxis()
    axes.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.4, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path("bench"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sustained", type=float, default=0.0, help="seconds")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--cases", type=int, nargs="*", help="indices; all by default")
    parser.add_argument(
        "--methods",
        nargs="*",
        default=list(METHODS),
        help=f"without {FROZEN!r} there are no ratios",
    )
    args = parser.parse_args()
    with_torch = not args.no_torch and importlib.util.find_spec("torch") is not None
    end = about(jax.devices()[0].device_kind)
    rows = []
    chosen = range(len(CASES)) if args.cases is None else args.cases
    for case in (CASES[i] for i in chosen):
        timings = list(time_jax(case, args.repeats, args.methods, args.sustained))
        if with_torch:
            timings += time_torch(case, args.repeats)
        for (method, what, timing), ratio in zip(timings, ratios(timings), strict=True):
            row = {
                "case": case.name,
                "method": method,
                "pass": what,
                "median_us": round(timing.median, 1),
                "p10_us": round(timing.p10, 1),
                "p90_us": round(timing.p90, 1),
                "ratio": ratio,
                **end,
            }
            rows.append(row)
            print(
                f"{case.name:42} {method:30} {what:18} {row['median_us']:9} us "
                f"{'' if ratio is None else ratio:6}",
                flush=True,
            )
    write_csv(args.output_dir / "kernels.csv", rows)
    plot(rows, args.output_dir / "kernels.png")


if __name__ == "__main__":
    main()

"""Bytes that a LoRA linear moves to and from device memory, counted by Nsight Compute.

A method runs in a process of its own under `ncu`, once with few calls and once with
more; the difference is what its calls moved, without what prepares them.

    python -m scripts.dram_traffic --case 1
"""

import argparse
import csv
import importlib.util
import io
import subprocess
import sys

import jax

from scripts.bench_cases import CASES, METHODS, arrays, call

TORCH = "torch, as PEFT"
CALLS = (2, 6)
COUNTERS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


def run(case_index: int, method: str, calls: int) -> None:
    """Forward and backward, so often; for the process that is watched."""
    case = CASES[case_index]
    if method == TORCH:
        from scripts import bench_torch

        found = bench_torch.calls(case)
        step = next(f for name, what, f in found if (name, what) == (method, "both"))
        for _ in range(calls):
            step()
        return
    groups, routing = arrays(case)
    function = jax.jit(call(method, routing, with_gradient=True))
    for _ in range(calls):
        function(groups)[0][0][0].block_until_ready()


def counted(case_index: int, method: str, calls: int) -> float:
    """Bytes that a whole process moved."""
    watched = [sys.executable, "-m", "scripts.dram_traffic", "--run", method]
    watched += ["--case", str(case_index), "--calls", str(calls)]
    ncu = ["ncu", "--clock-control", "none", "--csv", "--print-units", "base"]
    ncu += ["--metrics", ",".join(COUNTERS), "--target-processes", "all"]
    out = subprocess.run([*ncu, *watched], capture_output=True, text=True)
    lines = [line for line in out.stdout.splitlines() if line.startswith('"')]
    rows = csv.DictReader(io.StringIO("\n".join(lines)))
    values = [row["Metric Value"] for row in rows if row["Metric Name"] in COUNTERS]
    if out.returncode or not values:
        raise SystemExit(f"ncu counted nothing:\n{out.stdout}\n{out.stderr}")
    return sum(float(value.replace(",", "")) for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", type=int, default=1, help="index of the case")
    parser.add_argument(
        "--methods", nargs="*", default=["frozen", "jaxlora mosaic", TORCH]
    )
    parser.add_argument("--run", choices=[*METHODS, TORCH], help=argparse.SUPPRESS)
    parser.add_argument("--calls", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run(args.case, args.run, args.calls)
        return
    print(CASES[args.case].name)
    for method in args.methods:
        if method == TORCH and not importlib.util.find_spec("torch"):
            continue
        few, many = (counted(args.case, method, calls) for calls in CALLS)
        each = (many - few) / (CALLS[1] - CALLS[0])
        print(f"{method:30} {each / 1e6:10.1f} MB a call", flush=True)


if __name__ == "__main__":
    main()

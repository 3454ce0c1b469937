"""Counts the bytes that LoRA linears move to and from device memory.

Each method runs in a process of its own under Nsight Compute, once with few calls and
once with more. The difference is the traffic of its calls, without that of making its
operands. Prints a table. Needs a GPU and `ncu`; torch is optional.

    jaxlora bench traffic --case 1
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence

import jax

from jaxlora.bench.kernels import peers
from jaxlora.bench.kernels.methods import METHODS, call, operands, prepared
from jaxlora.bench.options import make_parser
from jaxlora.bench.report import markdown
from jaxlora.bench.shapes import KERNEL_CASES
from jaxlora.profile.dram_traffic import dram_bytes

TORCH = "torch, as PEFT"
CALLS = (2, 6)


def run(case_index: int, method: str, calls: int) -> None:
    """Runs forward and backward `calls` times, in the process that is watched."""
    case = KERNEL_CASES[case_index]
    if method == TORCH:
        found = peers.calls(case)
        step = next(f for name, what, f in found if (name, what) == (method, "both"))
        for _ in range(calls):
            step()
        return
    groups, routing = operands(case)
    function = jax.jit(call(method, with_gradient=True))
    inputs = prepared(method, groups)
    for _ in range(calls):
        jax.block_until_ready(function(inputs, routing))


def bytes_per_call(case_index: int, method: str) -> float:
    """Counts the bytes that one forward and backward moves."""
    command = [sys.executable, "-m", "jaxlora.bench.kernels.traffic"]
    command += ["--case", str(case_index), "--run", method]
    few, many = (dram_bytes([*command, "--calls", str(calls)]) for calls in CALLS)
    return (many - few) / (CALLS[1] - CALLS[0])


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    out = make_parser("traffic", __doc__)
    out.add_argument(
        "--case",
        type=int,
        choices=range(len(KERNEL_CASES)),
        default=1,
        help="index of the case, as in `jaxlora bench kernels`",
        metavar="I",
    )
    out.add_argument(
        "--methods",
        nargs="*",
        choices=[*METHODS, TORCH],
        default=["frozen", "jaxlora mosaic", TORCH],
    )
    out.add_argument("--run", choices=[*METHODS, TORCH], help=argparse.SUPPRESS)
    out.add_argument("--calls", type=int, help=argparse.SUPPRESS)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark with the given options."""
    args = parser().parse_args(argv)
    if args.run:
        run(args.case, args.run, args.calls)
        return
    lines = []
    for method in args.methods:
        if method == TORCH and not importlib.util.find_spec("torch"):
            lines.append([method, "skipped: torch is not installed"])
            continue
        lines.append([method, f"{bytes_per_call(args.case, method) / 1e6:.1f}"])
    print(f"{KERNEL_CASES[args.case].name}\n")
    print(markdown(("method", "MB per forward and backward"), lines))


if __name__ == "__main__":
    main()

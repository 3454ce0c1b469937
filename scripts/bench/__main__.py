"""Runs a benchmark and prints its tables; needs a checkout of jaxlora.

python -m scripts.bench kernels
python -m scripts.bench step --help
"""

import argparse
import dataclasses
import importlib
import logging
import sys
from collections.abc import Sequence
from types import ModuleType

from jaxlora.cli.options import add_device, use_device
from jaxlora.common.console import complain
from jaxlora.device_check import check_device_in_child
from jaxlora.errors import JaxloraError
from jaxlora.plan.memory.gpu_share import take_free_gpus


@dataclasses.dataclass(frozen=True)
class Subject:
    """A benchmark.

    Attributes:
        module: Module with the functions `add_options(parser)` and `run(options)`. Its
            docstring is the help. It must not start JAX's back ends when imported.
        summary: What it measures, in a few words.
        on_device: Whether it computes on the device.
        gathers: Whether it may gather weights, as with FSDP.
    """

    module: str
    summary: str
    on_device: bool = True
    gathers: bool = False


SUBJECTS = {
    "kernels": Subject("kernels.benchmark", "LoRA linears against the frozen layer"),
    "experts": Subject("kernels.experts", "linears of experts with LoRA"),
    "step": Subject("step.benchmark", "training steps against peft and the base alone"),
    "run": Subject(
        "run.benchmark", "whole runs, from the command to the end", on_device=False
    ),
    "together": Subject(
        "run.together", "a sweep against one at a time and peft", on_device=False
    ),
    "mesh": Subject(
        "mesh.benchmark", "pipelines and FSDP on the GPUs of a machine", gathers=True
    ),
    "serve": Subject("serve", "tenants of an engine against the offline trainer"),
    "http": Subject("http.benchmark", "clients of `jaxlora serve`", on_device=False),
    "scheduler": Subject(
        "scheduler.benchmark", "packers on a simulated pipeline", on_device=False
    ),
    "sweeps": Subject(
        "scheduler.sweeps", "planners of sweeps, simulated", on_device=False
    ),
    "replicas": Subject(
        "scheduler.replicas", "replicas of different shapes, simulated", on_device=False
    ),
    "fuse": Subject("fuse.benchmark", "functions as they are, and fused"),
    "tune": Subject("kernels.tune", "tile choices, for the kernels' tuning table"),
}
_PROGRAM = "python -m scripts.bench"


def run(name: str, argv: Sequence[str]) -> None:
    """Runs a subject, with the GPU memory that a run takes.

    Args:
        name: One of `SUBJECTS`.
        argv: The options; those of a subject are printed by `--help`.

    Raises:
        DeviceError: It computes, a GPU is visible, and JAX does not use it.
    """
    subject = SUBJECTS[name]
    module = importlib.import_module(f"scripts.bench.{subject.module}")
    options = parse(module, name, argv)
    use_device(options)
    if subject.on_device:
        check_device_in_child()
        take_free_gpus(gathers=subject.gathers)
    module.run(options)


def parse(module: ModuleType, name: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parses the options of a subject that a module measures."""
    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_device(parser)
    module.add_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Runs the subject that the first argument names; returns the exit status."""
    listed = (f"  {name:12} {s.summary}" for name, s in SUBJECTS.items())
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Runs a benchmark and prints its tables.",
        epilog="\n".join(["subjects:", *listed]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "subject",
        choices=SUBJECTS,
        help=f"see below; `{_PROGRAM} SUBJECT --help` lists its options",
        metavar="SUBJECT",
    )
    subject = parser.parse_args(argv[:1]).subject
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("jaxlora").setLevel(logging.INFO)
    try:
        run(subject, argv[1:])
    except (JaxloraError, OSError) as error:
        complain(f"{_PROGRAM}: error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

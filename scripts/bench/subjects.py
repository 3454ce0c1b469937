"""The subjects of `jaxlora bench`, and the modules that measure them."""

import argparse
import dataclasses
import importlib
from collections.abc import Sequence

from jaxlora.device_check import check_device_in_child
from jaxlora.plan.memory.gpu_share import take_free_gpus


@dataclasses.dataclass(frozen=True)
class Subject:
    """A benchmark.

    Attributes:
        module: Module with the functions `add_options(parser)` and `run(options)`. Its
            docstring is the help.
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
    "scheduler": Subject(
        "scheduler.benchmark", "packers on a simulated pipeline", on_device=False
    ),
    "sweeps": Subject(
        "scheduler.sweeps", "planners of sweeps, simulated", on_device=False
    ),
    "replicas": Subject(
        "scheduler.replicas", "replicas of different shapes, simulated", on_device=False
    ),
    "curves": Subject(
        "curves.benchmark", "rules of early exit, replayed", on_device=False
    ),
    "fuse": Subject("fuse.benchmark", "functions as they are, and fused"),
    "tune": Subject("kernels.tune", "tile choices, for the kernels' tuning table"),
}


def run(name: str, argv: Sequence[str]) -> None:
    """Imports a subject's module and runs it, with the GPU memory that a run takes.

    Args:
        name: One of `SUBJECTS`.
        argv: The options; those of a subject are printed by `--help`.

    Raises:
        DeviceError: It computes, a GPU is visible, and JAX does not use it.
    """
    subject = SUBJECTS[name]
    if subject.on_device and not {"-h", "--help"} & set(argv):
        check_device_in_child()
        take_free_gpus(gathers=subject.gathers)
    module = importlib.import_module(f"jaxlora.bench.{subject.module}")
    module.run(parse(module, name, argv))


def parse(module, name: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parses the options of a subject that a module measures."""
    parser = argparse.ArgumentParser(
        prog=f"jaxlora bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_options(parser)
    return parser.parse_args(argv)

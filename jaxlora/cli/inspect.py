"""`jaxlora inspect`."""

import argparse

from jaxlora.cli.command import Command
from jaxlora.cli.options import add_overrides, add_revision, use_device
from jaxlora.common.console import stdout


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    inspected = parser.add_mutually_exclusive_group(required=True)
    inspected.add_argument("path", nargs="?", help="folder, run file or hub id")
    inspected.add_argument(
        "--device",
        nargs="?",
        const=True,
        choices=("cpu",),
        help="describe the GPU, and which kernels and attention can run there; with "
        "cpu, the CPU",
    )
    add_overrides(parser)
    add_revision(parser)


def _run(arguments: argparse.Namespace) -> None:
    if arguments.device is not None:
        use_device(arguments)
        from jaxlora.inspect.device_support import inspect_device

        return inspect_device(stdout())
    from jaxlora.inspect import inspect_path

    inspect_path(
        arguments.path,
        stdout(),
        revision=arguments.revision,
        overrides=arguments.overrides,
    )


COMMAND = Command(
    name="inspect",
    text="Describe a model folder, a PEFT folder, a run or a run file; or the device.",
    example="jaxlora inspect runs/first",
    add_arguments=_add_arguments,
    run=_run,
)

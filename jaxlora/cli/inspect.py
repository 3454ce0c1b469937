"""`jaxlora inspect` and `jaxlora status`, which only read."""

import argparse
import dataclasses
import json
import pathlib

from jaxlora.cli.options import Command, add_overrides, add_revision, use_device
from jaxlora.common.console import say, stdout


def _add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
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


def _inspect(arguments: argparse.Namespace) -> None:
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


def _add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="output_dir of a run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _status(arguments: argparse.Namespace) -> int:
    from jaxlora.run.live.status_file import STATUS_FILE, read_status
    from jaxlora.run.lock import find_owner
    from jaxlora.run.status_view import print_status

    folder = pathlib.Path(arguments.run_dir)
    owner = find_owner(folder)
    process = None if owner is None else dataclasses.asdict(owner)
    if owner is not None and not (folder / STATUS_FILE).exists():
        if arguments.json:
            print(json.dumps({"process": process, "run": None}))
        else:
            say(f"{owner} is compiling; no job has begun")
        return 0
    saved = read_status(folder).seen(is_live=owner is not None)
    if arguments.json:
        print(json.dumps({"process": process, **saved.values()}))
    else:
        print_status(saved, owner, stdout())
    return 0


INSPECT = Command(
    name="inspect",
    text="Describe a model folder, a PEFT folder, a run or a run file; or the device.",
    example="jaxlora inspect runs/first",
    add_arguments=_add_inspect_arguments,
    run=_inspect,
)
STATUS = Command(
    name="status",
    text="Show the jobs of a run, their losses, the speed and the time left, and "
    "whether a process trains it now.",
    example="jaxlora status runs/first",
    add_arguments=_add_status_arguments,
    run=_status,
)

"""`jaxlora status`."""

import argparse
import dataclasses
import json
import pathlib

from jaxlora.cli.command import Command
from jaxlora.common.console import say, stdout


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="output_dir of a run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> int:
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


COMMAND = Command(
    name="status",
    text="Show the jobs of a run, their losses, the speed and the time left, and "
    "whether a process trains it now.",
    example="jaxlora status runs/first",
    add_arguments=_add_arguments,
    run=_run,
)

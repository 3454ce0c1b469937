"""`jaxlora export`."""

import argparse
import pathlib

from jaxlora.cli.command import Command
from jaxlora.common.console import complain, say


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="output_dir of a run")
    parser.add_argument("out", help="folder for one PEFT folder per job")
    parser.add_argument("--job", action="append", help="only this job; repeatable")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace folders in OUT that jaxlora did not write",
    )
    parser.add_argument(
        "--push",
        help="upload the folders to the hub: one job to OWNER/NAME, several to "
        "OWNER/NAME-JOB each",
        metavar="OWNER/NAME",
    )
    parser.add_argument(
        "--private", action="store_true", help="with --push: new repositories are so"
    )


def _run(arguments: argparse.Namespace) -> int:
    from jaxlora.hf.push import open_hub, push, repositories
    from jaxlora.train.saved.export import export_checkpoint

    hub = None
    # A name or a token that is wrong is refused before anything is written.
    if arguments.push is not None:
        repositories(arguments.push, [])
        hub = open_hub()
    exported = export_checkpoint(
        pathlib.Path(arguments.run_dir),
        pathlib.Path(arguments.out),
        arguments.job,
        overwrite=arguments.overwrite,
    )
    for folder in exported.folders:
        say(f"wrote {folder}")
    for name, reason in exported.left_out.items():
        complain(f"jaxlora: not exported: {name}: {reason}")
    if arguments.push is not None:
        names = repositories(arguments.push, [f.name for f in exported.folders])
        folders = {names[folder.name]: folder for folder in exported.folders}
        for address in push(folders, private=arguments.private, hub=hub):
            say(f"uploaded {address}")
    return int(bool(exported.left_out))


COMMAND = Command(
    name="export",
    text="Write a PEFT folder for each job of a run: as the run exported it, or as of "
    "the newest checkpoint, with a model card. The exit status is 1 if a job has "
    "nothing to write.",
    example="jaxlora export runs/first served",
    add_arguments=_add_arguments,
    run=_run,
)

"""`jaxlora export`."""

import argparse
import pathlib
import sys

from jaxlora.cli.command import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="output_dir of a run")
    parser.add_argument("out", help="folder for one PEFT folder per job")
    parser.add_argument("--job", action="append", help="only this job; repeatable")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace folders in OUT that jaxlora did not write",
    )


def _run(arguments: argparse.Namespace) -> int:
    from jaxlora.train.export import export_checkpoint

    exported = export_checkpoint(
        pathlib.Path(arguments.run_dir),
        pathlib.Path(arguments.out),
        arguments.job,
        overwrite=arguments.overwrite,
    )
    for folder in exported.folders:
        print(f"wrote {folder}")
    for name, reason in exported.left_out.items():
        print(f"jaxlora: not exported: {name}: {reason}", file=sys.stderr)
    return int(bool(exported.left_out))


COMMAND = Command(
    name="export",
    text="Write a PEFT folder for each job of a run: as the run exported it, or as of "
    "the newest checkpoint. The exit status is 1 if a job has nothing to write.",
    add_arguments=_add_arguments,
    run=_run,
)

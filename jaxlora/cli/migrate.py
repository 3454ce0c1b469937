"""`jaxlora migrate`."""

import argparse
import errno
import os
import pathlib

from jaxlora.cli.command import Command
from jaxlora.common.atomic import write_text
from jaxlora.common.console import complain, say
from jaxlora.printable import one_line


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        help="YAML of Axolotl, LLaMA-Factory or TRL, or PEFT's adapter_config.json",
    )
    parser.add_argument(
        "-o", "--output", help="run file to write; must not exist", metavar="FILE"
    )


def _run(arguments: argparse.Namespace) -> None:
    from jaxlora.migrate import migrate_file

    migration = migrate_file(arguments.file)
    text = migration.text(arguments.file)
    if arguments.output is None:
        print(text, end="")
        return
    if pathlib.Path(arguments.output).exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), arguments.output)
    write_text(arguments.output, text)  # all of it or nothing
    for key, reason in migration.left_out.items():
        complain(one_line(f"left out: {key}: {reason}"))
    for sentence in migration.to_do:
        complain(one_line(f"to do: {sentence}"))
    say(f"wrote {arguments.output}; next: jaxlora plan {arguments.output}")


COMMAND = Command(
    name="migrate",
    text="Write a run file from the settings of Axolotl, LLaMA-Factory, TRL or PEFT, "
    "and say what is left out.",
    example="jaxlora migrate axolotl.yml -o run.yaml",
    add_arguments=_add_arguments,
    run=_run,
)

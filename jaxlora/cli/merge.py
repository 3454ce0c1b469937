"""`jaxlora merge`."""

import argparse

from jaxlora.cli.command import Command
from jaxlora.cli.options import add_revision
from jaxlora.common.console import say


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", help="checkpoint folder or hub id")
    parser.add_argument("adapter", help="PEFT folder")
    parser.add_argument("out", help="folder to write; must not exist")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    add_revision(parser)


def _run(arguments: argparse.Namespace) -> None:
    from jaxlora.adapters.files.merge import merge_adapter

    folder = merge_adapter(
        arguments.base,
        arguments.adapter,
        arguments.out,
        dtype=arguments.dtype,
        revision=arguments.revision,
    )
    say(f"wrote {folder}")


COMMAND = Command(
    name="merge",
    text="Merge an adapter into its base as a Hugging Face folder.",
    example="jaxlora merge models/base runs/first/adapters/orders models/merged",
    add_arguments=_add_arguments,
    run=_run,
)

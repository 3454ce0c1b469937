"""`jaxlora convert`."""

import argparse

from jaxlora.cli.command import Command
from jaxlora.cli.options import add_revision


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="GGUF file, checkpoint folder or hub id")
    parser.add_argument("out", help="folder to write; must not exist")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add_revision(parser)


def _run(arguments: argparse.Namespace) -> None:
    from jaxlora.hf.convert import convert

    folder = convert(
        arguments.source,
        arguments.out,
        dtype=arguments.dtype,
        revision=arguments.revision,
    )
    print(f"wrote {folder}")


COMMAND = Command(
    name="convert",
    text="Convert a GGUF file, or a checkpoint in another dtype, to a Hugging Face "
    "folder of safetensors.",
    add_arguments=_add_arguments,
    run=_run,
)

"""`jaxlora convert`."""

import argparse

from jaxlora.cli.command import Command
from jaxlora.cli.options import add_revision
from jaxlora.common.console import say
from jaxlora.errors import ConfigError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="checkpoint folder, hub id or PEFT folder")
    parser.add_argument(
        "out", help="folder to write, or .gguf file of an adapter; must not exist"
    )
    parser.add_argument(
        "--base", help="base model of a PEFT folder, if not the one that it names"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--new-tokens",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="special tokens to add, with rows in embedding and head; a job trains "
        "them with new_special_tokens",
    )
    add_revision(parser)


def _run(arguments: argparse.Namespace) -> None:
    if arguments.out.endswith(".gguf"):
        from jaxlora.adapters.files.gguf_export import export_gguf

        if arguments.new_tokens:
            raise ConfigError(
                "--new-tokens adds tokens to a checkpoint, and not to a GGUF adapter. "
                "Leave it out."
            )
        out = export_gguf(
            arguments.source,
            arguments.out,
            base=arguments.base,
            revision=arguments.revision,
        )
        say(f"wrote {out}")
        return
    from jaxlora.hf.convert import convert

    folder = convert(
        arguments.source,
        arguments.out,
        dtype=arguments.dtype,
        revision=arguments.revision,
        new_tokens=arguments.new_tokens,
    )
    say(f"wrote {folder}")


COMMAND = Command(
    name="convert",
    text="Convert a checkpoint, which may be quantized, to a dense Hugging Face folder "
    "of safetensors, which may get more tokens; or a PEFT folder to a GGUF adapter for "
    "llama.cpp.",
    example="jaxlora convert models/quantized models/dense",
    add_arguments=_add_arguments,
    run=_run,
)

"""`jaxlora convert`."""

import argparse

from jaxlora.cli.command import Command
from jaxlora.cli.options import add_revision
from jaxlora.common.console import say


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="checkpoint folder, hub id or PEFT folder")
    parser.add_argument(
        "out", help="folder to write, or .gguf file of an adapter; must not exist"
    )
    parser.add_argument(
        "--base", help="base model of a PEFT folder, if not the one that it names"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add_revision(parser)


def _run(arguments: argparse.Namespace) -> None:
    if arguments.out.endswith(".gguf"):
        from jaxlora.adapters.files.gguf_export import export_gguf

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
    )
    say(f"wrote {folder}")


COMMAND = Command(
    name="convert",
    text="Convert a checkpoint, which may be quantized, to a dense Hugging Face folder "
    "of safetensors; or a PEFT folder to a GGUF adapter for llama.cpp.",
    example="jaxlora convert models/quantized models/dense",
    add_arguments=_add_arguments,
    run=_run,
)

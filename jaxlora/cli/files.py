"""`jaxlora migrate`, `convert`, `merge` and `export`, which write files and folders."""

import argparse
import errno
import os
import pathlib

from jaxlora.cli.options import Command, add_revision
from jaxlora.common.atomic import write_text
from jaxlora.common.console import complain, say
from jaxlora.errors import ConfigError
from jaxlora.printable import one_line


def _add_migrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        help="YAML of Axolotl, LLaMA-Factory or TRL, or PEFT's adapter_config.json",
    )
    parser.add_argument(
        "-o", "--output", help="run file to write; must not exist", metavar="FILE"
    )


def _migrate(arguments: argparse.Namespace) -> None:
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


def _add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="checkpoint folder, hub id or PEFT folder")
    parser.add_argument(
        "out", help="folder to write, or .gguf file of an adapter; must not exist"
    )
    parser.add_argument(
        "--base", help="base model of a PEFT folder, if not the one that it names"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="dtype of the weights; without it bfloat16, and with --new-tokens that of "
        "the source",
    )
    parser.add_argument(
        "--new-tokens",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="special tokens to add, with rows in embedding and head; a job trains "
        "them with new_special_tokens",
    )
    add_revision(parser)


def _convert(arguments: argparse.Namespace) -> None:
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


def _add_merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", help="checkpoint folder or hub id")
    parser.add_argument("adapter", help="PEFT folder")
    parser.add_argument("out", help="folder to write; must not exist")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    add_revision(parser)


def _merge(arguments: argparse.Namespace) -> None:
    from jaxlora.adapters.files.merge import merge_adapter

    folder = merge_adapter(
        arguments.base,
        arguments.adapter,
        arguments.out,
        dtype=arguments.dtype,
        revision=arguments.revision,
    )
    say(f"wrote {folder}")


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
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


def _export(arguments: argparse.Namespace) -> int:
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


MIGRATE = Command(
    name="migrate",
    text="Write a run file from the settings of Axolotl, LLaMA-Factory, TRL or PEFT, "
    "and say what is left out.",
    example="jaxlora migrate axolotl.yml -o run.yaml",
    add_arguments=_add_migrate_arguments,
    run=_migrate,
)
CONVERT = Command(
    name="convert",
    text="Convert a checkpoint, which may be quantized, to a dense Hugging Face folder "
    "of safetensors, which may get more tokens; or a PEFT folder to a GGUF adapter for "
    "llama.cpp.",
    example="jaxlora convert models/quantized models/dense",
    add_arguments=_add_convert_arguments,
    run=_convert,
)
MERGE = Command(
    name="merge",
    text="Merge an adapter into its base as a Hugging Face folder.",
    example="jaxlora merge models/base runs/first/adapters/orders models/merged",
    add_arguments=_add_merge_arguments,
    run=_merge,
)
EXPORT = Command(
    name="export",
    text="Write a PEFT folder for each job of a run: as the run exported it, or as of "
    "the newest checkpoint, with a model card. The exit status is 1 if a job has "
    "nothing to write.",
    example="jaxlora export runs/first served",
    add_arguments=_add_export_arguments,
    run=_export,
)

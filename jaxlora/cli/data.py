"""`jaxlora data`."""

import argparse
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxlora.cli.options import Command, add_overrides, add_revision, positive_int
from jaxlora.common.console import stdout

if TYPE_CHECKING:
    from jaxlora.config import LoraJob

# Options that are settings of the data, by their names in a run file.
_SETTINGS = {
    "kind": "prompt_completion, messages, text, alpaca, preference, unpaired, distill",
    "prompt": "field of the prompt, or a template over fields",
    "completion": "field of the completion, or a template over fields",
    "messages": "field of the messages",
    "text": "field of the plain text, or a template over fields",
    "chosen": "field of the chosen answer, with --kind preference",
    "rejected": "field of the rejected answer, with --kind preference",
    "label": "field that says whether the answer is a good one, with --kind unpaired",
    "system": "field of the system message of chats, a template over fields, or a text",
    "loss_on": "completion, last or all",
    "chat_template": "file, model's folder, name or text of a chat template",
    "split": "split of a Hugging Face dataset",
    "subset": "configuration of a dataset on the hub",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["show"], help="show: print samples")
    parser.add_argument(
        "path", help="file, saved dataset or hub id of data; or a run file (.yaml)"
    )
    add_overrides(parser)
    parser.add_argument(
        "--model", help="folder or hub id, for the tokens and the chat template"
    )
    add_revision(parser)
    parser.add_argument("--job", help="only this job of a run file", metavar="NAME")
    parser.add_argument(
        "--samples", type=positive_int, default=3, help="how many (3)", metavar="N"
    )
    parser.add_argument(
        "--all", action="store_true", help="also read and count all other records"
    )
    parser.add_argument("--max-length", type=positive_int, metavar="N")
    parser.add_argument(
        "--chat", action="store_true", default=None, help="use the chat template"
    )
    for name, text in _SETTINGS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, help=text, metavar="X")


def _run(arguments: argparse.Namespace) -> None:
    from jaxlora.data.tokenizer import load_tokenizer
    from jaxlora.data.tokens.show import show_data
    from jaxlora.data.tokens.tokenize import with_kind
    from jaxlora.hf.files import tokenizer_folder

    model, revision, jobs = _jobs(arguments)
    tokenizer = None
    if model is not None:
        tokenizer = load_tokenizer(tokenizer_folder(model, revision))
    console = stdout()
    for job in jobs:
        for data in job.data.sets:
            show_data(
                with_kind(data, job),
                tokenizer,
                console,
                max_length=job.max_length,
                num_samples=arguments.samples,
                reads_all=arguments.all,
            )


def _jobs(
    arguments: argparse.Namespace,
) -> tuple[str | None, str | None, list["LoraJob"]]:
    """Returns the model, its revision, and the jobs whose data are shown."""
    from jaxlora.config.run_file import RunFile
    from jaxlora.errors import ConfigError

    settings = dict(_given_settings(arguments))
    if pathlib.Path(arguments.path).suffix not in (".yaml", ".yml"):
        if arguments.job is not None:
            raise ConfigError(
                f"--job {arguments.job} names a job of a run file, and "
                f"{arguments.path} is not a .yaml file. Leave it out."
            )
        if arguments.overrides:
            raise ConfigError(
                f"{arguments.overrides[0]} is a setting of a run file, and "
                f"{arguments.path} is not a .yaml file. Leave it out."
            )
        return arguments.model, arguments.revision, [_job(arguments.path, settings)]
    if settings:
        raise ConfigError(
            f"--{next(iter(settings)).replace('_', '-')} is for a file of data, and "
            f"{arguments.path} is a run file, which has its own settings. Leave it out."
        )
    run = RunFile.read(arguments.path, arguments.overrides).config({})
    jobs = [job for job in run.jobs if arguments.job in (None, job.name)]
    if not jobs:
        names = ", ".join(job.name for job in run.jobs)
        raise ConfigError(
            f"{arguments.path}: has no job named {arguments.job!r}. Give one of: "
            f"{names}."
        )
    if arguments.model is not None:
        return arguments.model, arguments.revision, jobs
    return run.model, run.revision, jobs


def _given_settings(arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    for name in (*_SETTINGS, "chat", "max_length"):
        value = getattr(arguments, name)
        if value is not None:
            yield name, value


def _job(path: str, settings: dict[str, Any]) -> "LoraJob":
    """Makes a job that reads one data set."""
    from jaxlora.config.run_file import run_config
    from jaxlora.problems import Source

    job: dict[str, Any] = {"name": "data", "data": {"path": path}}
    if "max_length" in settings:
        job["max_length"] = settings["max_length"]
    job["data"] |= {k: v for k, v in settings.items() if k != "max_length"}
    if settings.get("kind") in ("preference", "unpaired"):
        job["objective"] = "kto"  # it learns from both
    if settings.get("kind") == "distill":
        job["objective"] = "distill"
    source = Source("jaxlora data")
    return run_config({"model": "none", "jobs": [job]}, source=source).jobs[0]


COMMAND = Command(
    name="data",
    text="Show how records are read and rendered, and which tokens are trained on.",
    example="jaxlora data show run.yaml",
    add_arguments=_add_arguments,
    run=_run,
)

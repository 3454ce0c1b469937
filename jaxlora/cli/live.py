"""`jaxlora stop`, `pause`, `resume`, `add` and `clone`: requests to a live run."""

import argparse
import pathlib
from typing import TYPE_CHECKING, Any

from jaxlora.cli.options import Command, positive_int
from jaxlora.common.console import complain, say

if TYPE_CHECKING:
    from jaxlora.run.live.mailbox import Action


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="output_dir of a run that trains")
    parser.add_argument(
        "--timeout",
        type=positive_int,
        help="wait N seconds for the answer, which comes within a few microbatches; "
        "by default until the run ends",
        metavar="N",
    )


def _add_job(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("job", help="name of the job")


def _add_job_and_reason(parser: argparse.ArgumentParser) -> None:
    _add_job(parser)
    parser.add_argument("--reason", default="", help="is shown with the job's status")


def _add_job_file(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "job_file",
        help="YAML with the keys of one job; the others are the run file's defaults",
    )


def _add_changes(parser: argparse.ArgumentParser) -> None:
    _add_job(parser)
    parser.add_argument(
        "changes",
        nargs="*",
        default=[],  # without one, argparse would say that it is required
        metavar="SETTING=VALUE",
        help="settings that differ, such as learning_rate=3e-4",
    )
    parser.add_argument("--name", help="name of the copy; by default from the changes")


def _ask(arguments: argparse.Namespace, action: "Action", job: str, **values) -> int:
    """Sends a request, and prints the answer."""
    from jaxlora.run.live.client import send

    folder = pathlib.Path(arguments.run_dir)
    answer = send(folder, action, job, timeout=arguments.timeout, **values)
    if answer.is_accepted:
        say(answer.text)
        return 0
    complain(f"jaxlora: refused: {answer.text}")
    return 1


def _stop(arguments: argparse.Namespace) -> int:
    return _ask(arguments, "stop", arguments.job, reason=arguments.reason)


def _pause(arguments: argparse.Namespace) -> int:
    return _ask(arguments, "pause", arguments.job, reason=arguments.reason)


def _resume(arguments: argparse.Namespace) -> int:
    return _ask(arguments, "resume", arguments.job)


def _add(arguments: argparse.Namespace) -> int:
    from jaxlora.run.live.client import job_settings

    settings: dict[str, Any] = job_settings(
        pathlib.Path(arguments.job_file), pathlib.Path(arguments.run_dir)
    )
    return _ask(arguments, "add", settings["name"], settings=settings)


def _clone(arguments: argparse.Namespace) -> int:
    from jaxlora.common.yaml_file import parse_yaml
    from jaxlora.errors import ConfigError

    settings: dict[str, Any] = {}
    for text in arguments.changes:
        key, is_given, value = text.partition("=")
        if not is_given or key in settings:
            raise ConfigError(
                f"{text!r}: give each setting once, such as learning_rate=3e-4; --name "
                "names the copy."
            )
        settings[key] = parse_yaml(value, key)
    if arguments.name is not None:
        settings["name"] = arguments.name
    return _ask(arguments, "clone", arguments.job, settings=settings)


STOP = Command(
    name="stop",
    text="Stop a job of a run that trains: it ends after its current global batch, and "
    "is evaluated and exported.",
    example="jaxlora stop runs/first orders",
    add_arguments=_add_job_and_reason,
    run=_stop,
)
PAUSE = Command(
    name="pause",
    text="Take a job of a run that trains out of its slot, with all its state. If only "
    "paused jobs are left, the run ends.",
    example="jaxlora pause runs/first orders",
    add_arguments=_add_job_and_reason,
    run=_pause,
)
RESUME = Command(
    name="resume",
    text="Let a paused job continue when a slot is free. If the run does not train, "
    "this waits for `jaxlora train --resume`, which continues the run itself.",
    example="jaxlora resume runs/first orders",
    add_arguments=_add_job,
    run=_resume,
)
ADD = Command(
    name="add",
    text="Add a job to a run that trains. It must fit the run's slots: their rank, "
    "their modules, and dropout.",
    example="jaxlora add runs/first job.yaml",
    add_arguments=_add_job_file,
    run=_add,
)
CLONE = Command(
    name="clone",
    text="Add a copy of a job to a run that trains. It takes the job's weights, "
    "optimizer state and position in the data after its next batch, and goes on with "
    "other settings: rate, schedule, steps, dropout, decay, clipping, evaluation.",
    example="jaxlora clone runs/first orders learning_rate=3e-4",
    add_arguments=_add_changes,
    run=_clone,
)

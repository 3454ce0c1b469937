"""The parts of a command, and options that several commands have."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxlora.config import RunConfig
    from jaxlora.config.run_file import RunFile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One command of `jaxlora`.

    Attributes:
        name: Its name on the command line.
        text: What it does, for `--help`.
        example: A call of it, which an error shows if an argument is missing.
        add_arguments: Adds its arguments to its parser.
        run: Runs it. It returns the exit status; None means 0. It imports what it needs
            by itself, so that `jaxlora --help` stays fast.
    """

    name: str
    text: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]


# Options that replace a setting of the run file, by the setting.
OPTIONS = {"output_dir": "--output-dir", "mesh": "--mesh"}


def add_revision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--revision", help="branch, tag or commit of a hub id", metavar="REV"
    )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # without one, argparse would say that it is required
        metavar="KEY=VALUE",
        help="settings in place of those of the run file, such as "
        "defaults.learning_rate=1e-4 or jobs.orders.rank=32",
    )


def take_overrides(arguments: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Adds settings that follow an option, where argparse does not look for them.

    Returns:
        The arguments that are none.
    """
    if not hasattr(arguments, "overrides"):
        return list(rest)
    is_setting = [not text.startswith("-") and "=" in text for text in rest]
    found = zip(rest, is_setting, strict=True)
    arguments.overrides += [text for text, is_one in found if is_one]
    return [text for text, is_one in zip(rest, is_setting, strict=True) if not is_one]


def read_run(
    arguments: argparse.Namespace,
) -> tuple["RunFile", dict[str, str], "RunConfig"]:
    """Returns the run file, the options that replace its settings, and the run."""
    from jaxlora.config.run_file import RunFile
    from jaxlora.plan.job.found_inputs import missing_inputs

    options = {name: getattr(arguments, name, None) or None for name in OPTIONS}
    given = {name: value for name, value in options.items() if value is not None}
    file = RunFile.read(arguments.run_file, arguments.overrides, **OPTIONS)
    return file, given, file.config(given, find_missing=missing_inputs)


def add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh",
        help="replaces mesh of the run file: sizes such as stage=2,fsdp=2, or auto",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("cpu",),
        help="cpu: compute on the CPU although there is a GPU",
    )


def use_device(arguments: argparse.Namespace) -> None:
    """Does what `--device` asks for; JAX must not have started."""
    from jaxlora.device_check import use_cpu

    if arguments.device == "cpu":
        use_cpu()


def positive_int(text: str) -> int:
    """Reads a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def add_price(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--price-per-hour",
        type=_price,
        metavar="P",
        help="price of one GPU for an hour, in any currency; all GPUs of the machine "
        "are paid for",
    )


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a price, such as 2.50")
    return price

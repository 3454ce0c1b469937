"""The parts that every command of the command line defines."""

import argparse
import dataclasses
from collections.abc import Callable


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

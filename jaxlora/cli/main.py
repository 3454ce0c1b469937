"""The `jaxlora` command."""

import argparse
import contextlib
import difflib
import gc
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import NoReturn

from jaxlora import __version__
from jaxlora.cli.commands import COMMANDS
from jaxlora.cli.options import take_overrides
from jaxlora.common import console
from jaxlora.common.background import end_process
from jaxlora.errors import JaxloraError
from jaxlora.printable import printable

# How long a thread waits before it makes the running one release the interpreter's
# lock; Python's default is 5 ms. A thread that reads small tensors needs the lock
# often: beside a main thread that imports and plans, two threads took 1.9 s for 270
# tensors with the default, and take 0.6 s with this.
_TURN_SECONDS = 2e-4


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Its arguments; None: those of this process, which is only for the command.

    Returns:
        The exit status: 0, 1 after an error, or 130 after Ctrl-C.
    """
    # A file name that the terminal cannot show must not raise an error.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if argv is None:
        sys.setswitchinterval(_TURN_SECONDS)
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest := take_overrides(arguments, rest):
        arguments.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    with _logging(arguments.verbose):
        status = _run(arguments)
    if argv is None:
        end_process(status)
        # As it ends, Python would search all objects for garbage: half a second.
        gc.freeze()
    return status


def _run(arguments: argparse.Namespace) -> int:
    """Runs a command; a user's error becomes a line on stderr."""
    try:
        return arguments.run(arguments) or 0
    except JaxloraError as error:
        console.complain(f"jaxlora: error: {error}")
        return 1
    except OSError as error:
        console.complain(f"jaxlora: error: {_describe(error)}")
        return 1
    except KeyboardInterrupt:
        console.complain("jaxlora: interrupted.")
        return 130


def _describe(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


@contextlib.contextmanager
def _logging(verbose: bool) -> Iterator[None]:
    """Logs to stderr while a command runs."""
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    if console.stderr.is_terminal:
        from rich.logging import RichHandler

        handler = RichHandler(console=console.stderr, show_path=False)
    handler.addFilter(console.escape_record)
    logger = logging.getLogger("jaxlora")
    before = logger.level, logger.propagate, warnings.showwarning
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False
    warnings.showwarning = _log_warning
    # Orbax logs every phase of every save.
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        level, logger.propagate, warnings.showwarning = before
        logger.setLevel(level)


def _log_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Logs a warning on one line, without its location in the code."""
    from jaxlora.train.compilation_cache import add_advice

    logging.getLogger("jaxlora").warning("%s", add_advice(str(message)))


# The beginnings of errors of argparse that name what is wrong.
_CHOICE = re.compile(r"(?P<head>.*invalid choice: '(?P<wrong>.*)') \(choose from .*")
_UNKNOWN = re.compile(r"(?P<head>unrecognized arguments: (?P<wrong>--[\w-]+).*)")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors say what was meant.

    They quote arguments, which may be names of files, safely.

    Attributes:
        example: A call, which is shown if an argument is missing.
    """

    example = ""

    def error(self, message: str) -> NoReturn:
        if found := _CHOICE.fullmatch(message) or _UNKNOWN.fullmatch(message):
            choices = message[found.end("head") :] or self.format_help()
            known = re.findall(r"[\w-]+", choices)
            if near := difflib.get_close_matches(found["wrong"], known, n=1):
                message = f"{found['head']}. Did you mean {near[0]}?"
        if self.example and "required" in message:
            message += f". For example: {self.example}"
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jaxlora",
        description="Train many LoRA adapters at once on one frozen language model.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name, help=command.text, description=command.text
        )
        command.add_arguments(sub)
        sub.example = command.example
        sub.set_defaults(run=command.run, parser=sub)
    return parser

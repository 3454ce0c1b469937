"""Prints to terminals without markup, using only characters that are safe there.

Names and reasons may come from files of others, so control and invisible characters
are escaped in everything that is printed: see `jaxlora.printable`. Characters that the
terminal cannot encode have substitutes.
"""

import copy
import logging
import sys
import traceback
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from jaxlora.printable import one_line, printable

# Substitutes for characters that a terminal cannot encode.
_PLAINER = str.maketrans({"→": "->", "…": "~", "·": "-"})

_WHOLE = 10_000  # columns, which no line has

# Log lines and progress bars share a console, so they do not overwrite each other.
stderr = Console(stderr=True, markup=False, emoji=False, highlight=False)


def stdout() -> Console:
    """Returns a console that prints to standard output.

    If that is a file or a pipe, lines are as long as they need to be: names stay whole,
    and a table has one line for each row.
    """
    console = Console()
    if not (sys.stdout.isatty() or console.is_jupyter):
        console.width = _WHOLE
    return console


def literal(value: object) -> Text:
    """Returns a line that rich prints literally, ignoring markup and emoji codes."""
    return Text(one_line(value))


def plain_table(**options) -> Table:
    """Returns an empty table that has a line below its head, and no others."""
    return Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, **options)


def say(text: object) -> None:
    """Prints a text on standard output."""
    print(printable(text))


def complain(text: object) -> None:
    """Prints a text on standard error."""
    print(printable(text), file=sys.stderr, flush=True)


def escape_record(record: logging.LogRecord) -> logging.LogRecord:
    """Returns a copy of a log record that is safe to print: a filter of handlers.

    The lines of a message after the first are indented, so that none of them looks like
    another message.
    """
    safe = copy.copy(record)
    safe.msg = printable(record.getMessage()).replace("\n", "\n    ")
    safe.args = None
    if record.exc_info:
        safe.exc_text = printable("".join(traceback.format_exception(*record.exc_info)))
    return safe


def show(console: Console, shown: RenderableType, **options) -> None:
    """Prints a table or a text, with substitutes for characters without an encoding.

    Args:
        console: Console to print to.
        shown: The table or text. Markup in a text has no effect.
        **options: Options of `Console.print`.
    """
    if isinstance(shown, str):
        shown = Text(printable(shown))
    console.print(_Encodable(shown), **options)


class _Encodable:
    """A renderable with only such characters as the terminal can print."""

    def __init__(self, inner: RenderableType):
        self._inner = inner

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Segment]:
        for segment in console.render(self._inner, options.update(markup=False)):
            if segment.control:
                yield segment
                continue
            text = printable(segment.text)
            try:
                text.encode(options.encoding)
            except UnicodeEncodeError:
                text = text.translate(_PLAINER)
                encoded = text.encode(options.encoding, "backslashreplace")
                text = encoded.decode(options.encoding)
            yield Segment(text, segment.style)

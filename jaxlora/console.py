"""Prints to terminals without markup, using only characters that they can encode."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# Substitutes for characters that a terminal cannot encode.
_PLAINER = str.maketrans({"→": "->", "…": "~", "·": "-"})

# Log lines and progress bars share a console, so they do not overwrite each other.
stderr = Console(stderr=True, markup=False, emoji=False, highlight=False)


def literal(value: object) -> Text:
    """Returns a text that rich prints literally, ignoring markup and emoji codes."""
    return Text(str(value))


def show(console: Console, shown: RenderableType, **options) -> None:
    """Prints a table or a text, with substitutes for characters without an encoding.

    Args:
        console: Console to print to.
        shown: The table or text. Markup in a text has no effect.
        **options: Options of `Console.print`.
    """
    if isinstance(shown, str):
        shown = literal(shown)
    console.print(_Encodable(shown), **options)


class _Encodable:
    """A renderable with substitutes for characters that the terminal cannot encode."""

    def __init__(self, inner: RenderableType):
        self._inner = inner

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Segment]:
        for segment in console.render(self._inner, options.update(markup=False)):
            text = segment.text
            try:
                text.encode(options.encoding)
            except UnicodeEncodeError:
                text = text.translate(_PLAINER)
                encoded = text.encode(options.encoding, "backslashreplace")
                text = encoded.decode(options.encoding)
            yield Segment(text, segment.style, segment.control)

"""Makes texts from files and other programs safe to print.

A control character can move the cursor, colour the screen or hide text, and an
invisible or bidirectional one can make a name look like another. They are printed as
escapes instead, as Python writes them.
"""

import unicodedata

# Control, format and private surrogate characters, and separators of lines.
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# Invisible characters of other categories: fillers of Hangul, and the grapheme joiner.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")
# Generated texts keep these: Persian, Indic scripts and emoji need the joiners.
KEPT_IN_TEXTS = "\n\t\u200c\u200d"


def printable(text: object, *, keep: str = "\n\t") -> str:
    """Returns a text with escapes for control and invisible characters.

    Args:
        text: The text, or what `str` makes one of.
        keep: Characters that stay, although they are such ones.
    """
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in keep or not _is_escaped(c) else _escape(c) for c in text)


def one_line(text: object) -> str:
    """Returns `printable` text that also has no line breaks and no tabs."""
    return printable(text, keep="")


def has_invisible(text: str) -> bool:
    """Whether `one_line` would change a text."""
    return one_line(text) != text


def _is_escaped(character: str) -> bool:
    return unicodedata.category(character) in _ESCAPED or character in _INVISIBLE


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")

"""The content of a message that has no text, as chat templates see it.

OpenAI writes `"content": null` where a message only calls tools. Some templates print
calls only where the content is none; others search the content, split it, or put it
between other texts, which null cannot do or which prints "None". So such a content is
none for every test of a template, and an empty text for everything else. This runs in
the process of `template_worker`.
"""

from collections.abc import Callable, Mapping
from typing import Any


class AbsentText(str):
    """An empty text that a chat template takes for none."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or other == ""

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


# Jinja's errors name the types of values.
AbsentText.__name__, AbsentText.__module__ = "str", "builtins"
ABSENT = AbsentText()


def tests_of_none(tests: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Returns those of Jinja's tests that tell none from a text, for `AbsentText`.

    Args:
        tests: Jinja's tests by name.
    """

    def as_none(test: Callable[..., Any]) -> Callable[..., Any]:
        return lambda value, *rest: test(without_absent(value), *rest)

    names = ("none", "string", "sequence", "iterable")
    return {name: as_none(tests[name]) for name in names}


def without_absent(value: Any) -> Any:
    """Returns a value, a message or a list of messages with None for `AbsentText`."""
    if isinstance(value, AbsentText):
        return None
    if isinstance(value, dict) and isinstance(value.get("content"), AbsentText):
        return {**value, "content": None}
    if isinstance(value, list):
        return [without_absent(item) for item in value]
    return value

"""Gives chat templates messages that call tools in the form that each expects.

Templates print arguments in three ways: most apply `tojson` to an object or loop over
its items, some print JSON text as it is, and some test which of the two they got. Of
text, the first kind makes a quoted string, which no tool can read; of an object, the
second makes Python's notation, or fails. So arguments are given as an object whose text
is JSON.

OpenAI writes `"content": null` where a message only calls tools. Some templates print
calls only where the content is none; others search the content, split it, or put it
between other texts, which null cannot do or which prints "None". So such a content is
none for every test of a template, and an empty text for everything else.

This runs in the process of `template_worker`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
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


class Arguments(dict):
    """The arguments of a call: an object that prints as JSON."""

    __slots__ = ("_text",)

    def __init__(self, values: Mapping[str, Any], text: str | None = None):
        """Makes an object that prints as JSON.

        Args:
            values: The arguments by name.
            text: The JSON text that they were read from, if they were.
        """
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        if self._text is None:
            return json.dumps(self, ensure_ascii=False)
        return self._text

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def prepare_messages(messages: Sequence[Any]) -> list[Any]:
    """Returns messages whose calls and absent contents suit all chat templates."""
    return [
        _prepared(message)
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _prepared(message: dict[str, Any]) -> dict[str, Any]:
    message = {**message, "tool_calls": list(map(_call, message["tool_calls"]))}
    if message.get("content") is None:
        message["content"] = ABSENT
    return message


def _call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if "function" in call:
        return call | {"function": _call(call["function"])}
    if "arguments" not in call:
        return call
    return call | {"arguments": _arguments(call["arguments"])}


def _arguments(given: Any) -> Any:
    if given is None or (isinstance(given, str) and not given.strip()):
        return Arguments({})
    if isinstance(given, dict):
        return Arguments(given)
    if not isinstance(given, str):
        return given
    try:
        values = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return Arguments(values, given) if isinstance(values, dict) else given

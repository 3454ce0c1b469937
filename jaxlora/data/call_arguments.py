"""Gives chat templates the arguments of calls in the form that each expects.

Templates print arguments in three ways: most apply `tojson` to an object or loop over
its items, some print JSON text as it is, and some test which of the two they got. Of
text, the first kind makes a quoted string, which no tool can read; of an object, the
second makes Python's notation, or fails. So arguments are given as an object whose text
is JSON. This runs in the process of `template_worker`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any


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


def with_arguments(messages: Sequence[Any]) -> list[Any]:
    """Returns messages in which the arguments of all calls are `Arguments`."""
    return [
        message | {"tool_calls": [_with_arguments(c) for c in message["tool_calls"]]}
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _with_arguments(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if "function" in call:
        return call | {"function": _with_arguments(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, dict):
        return call | {"arguments": Arguments(arguments)}
    if not isinstance(arguments, str):
        return call
    try:
        values = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return call
    if not isinstance(values, dict):
        return call
    text = arguments if arguments.strip() else None
    return call | {"arguments": Arguments(values, text)}

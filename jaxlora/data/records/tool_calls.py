"""Checks tools and the calls of tools, and converts them for chat templates.

OpenAI stores the arguments of a call as JSON text. Templates expect an object, so the
process that renders them converts the text (`templates/call_arguments.py`).
"""

import json
from typing import Any

from jaxlora.data.records.values import without_nulls
from jaxlora.errors import DataError

# Other formats use these keys for the arguments of a call.
_OTHER_ARGUMENTS = ("parameters", "args", "input", "kwargs")


def read_tools(tools: Any, field: str, *, is_columnar: bool) -> list[Any] | None:
    """Reads a record's tools: a list, or a list as JSON text; None if there are none.

    Args:
        tools: The field's value.
        field: Its name, for errors.
        is_columnar: Whether null stands for an absent key, at any depth.

    Raises:
        DataError: The value is neither a list nor a list as JSON, or a tool or its
            parameters are not an object.
    """
    given = tools
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"field {field!r} is {given!r:.80}, which is not valid JSON ({error}). "
                "Write a list of tools."
            ) from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise DataError(
            f"field {field!r} is {given!r:.80}, not a list of tools. Write "
            '[{"type": "function", "function": {"name": ...}}, ...], or that as JSON.'
        )
    tools = without_nulls(tools) if is_columnar else tools
    return [_with_parameters(tool, f"{field}[{i}]") for i, tool in enumerate(tools)]


def read_calls(calls: Any, where: str) -> list[Any]:
    """Reads the calls of tools in a message: a list, or a list as JSON text.

    Args:
        calls: The value of `tool_calls`.
        where: Its place in the record, for errors.

    Raises:
        DataError: The value is not a list of calls, or the arguments of a call are
            neither an object nor an object as JSON text.
    """
    given = calls
    calls = _parse(calls) if isinstance(calls, str) else calls
    if not isinstance(calls, list):
        raise DataError(
            f"{where} is {given!r:.80}, not a list of calls. Write "
            '[{"type": "function", "function": {"name": ..., "arguments": {...}}}].'
        )
    for i, call in enumerate(calls):
        _check_call(call, f"{where}[{i}]")
    return calls


def read_said_calls(value: Any, where: str) -> list[Any]:
    """Reads the calls of tools that ShareGPT stores as JSON text.

    Args:
        value: The value of a message by `function_call`: a call, or a list of calls.
        where: Its place in the record, for errors.

    Raises:
        DataError: The value is not the call of a function.
    """
    calls = _parse(value) if isinstance(value, str) else value
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise DataError(
            f"{where} is {value!r:.80}, not the call of a function. Write "
            '{"name": ..., "arguments": {...}} as JSON text.'
        )
    return [{"type": "function", "function": call} for call in calls]


def _check_call(call: Any, where: str) -> None:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise DataError(
            f"{where} is {call!r:.80}, not the call of a function. Write "
            '{"type": "function", "function": {"name": ..., "arguments": {...}}}.'
        )
    given = function.get("arguments")
    for key in _OTHER_ARGUMENTS:
        if given is None and function.get(key) is not None:
            raise DataError(
                f"{where} has {key!r}, and chat templates print 'arguments'. Rename "
                "the key."
            )
    if given is None or (isinstance(given, str) and not given.strip()):
        return
    arguments = _parse(given) if isinstance(given, str) else given
    if not isinstance(arguments, dict):
        raise DataError(
            f"the arguments of {where} are {given!r:.80}, not an object. Write an "
            'object, such as {"city": "Rome"}, or an object as JSON text.'
        )


def _with_parameters(tool: Any, where: str) -> Any:
    """Returns a tool as an object; it or its parameters may be JSON text."""
    given = tool
    tool = _parse(tool) if isinstance(tool, str) else tool
    if not isinstance(tool, dict):
        raise DataError(
            f"{where} is {given!r:.80}, not a tool. Write "
            '{"type": "function", "function": {"name": ...}}, or that as JSON.'
        )
    if isinstance(tool.get("function"), dict):
        return tool | {"function": _with_parameters(tool["function"], where)}
    parameters = tool.get("parameters")
    if not isinstance(parameters, str):
        return tool
    parsed = _parse(parameters)
    if not isinstance(parsed, dict):
        raise DataError(
            f"the parameters of {where} are {parameters!r:.80}, not a JSON schema. "
            'Write an object, such as {"type": "object", "properties": {...}}.'
        )
    return tool | {"parameters": parsed}


def _parse(text: str) -> Any:
    """Returns the value of JSON text; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

"""Finds what a chat template leaves out of a conversation with tools.

Templates print calls of tools in many forms, and some print them only in messages
without text, or only the first one. So what a template prints cannot be searched for
the calls. Instead, the conversation is rendered once more, with a mark behind each name
and value, and the marks are searched for. This runs in the process of
`template_worker`.
"""

import dataclasses
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxlora.data.templates.call_arguments import Arguments
from jaxlora.data.templates.sandbox import ChatTemplate, Span
from jaxlora.data.templates.turns import UnclearTurnError

# Capitals show that a template does not change them.
_TEXT_MARK = f"Zq_{secrets.token_hex(4)}_"
_NUMBER_MARK = 10**13 + secrets.randbelow(10**8) * 10**5
_PLAIN_ROLES = ("system", "developer", "user", "assistant")

_CALL_CURE = (
    "Use a template that prints all calls, or write the call into the content, in the "
    "form in which the model is to make it"
)
_TEXT_CURE = (
    "Many templates print either a call or text: give the text in a message of its own "
    "before the call, or use a template that prints both"
)
_RESULT_CURE = (
    "Use a template that prints such messages, or give the result in a message of the "
    "user"
)
_TOOL_CURE = "Use a template that prints tools, or remove them from the record"


class LostPartError(Exception):
    """A template leaves out a part of a conversation; the error says which."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A part of a conversation that has to be printed.

    Attributes:
        what: Describes it.
        value: The text, number, bool or null, or an empty list or object.
        mark: What is printed if the marked value is printed.
        cure: What to do if it is not printed.
        caller: Index of the message that has to print it; None: any message may.
        is_result: Whether it is the content of a message that is not trained on.
    """

    what: str
    value: Any
    mark: str
    cure: str
    caller: int | None = None
    is_result: bool = False


class _Marker:
    """Puts marks behind the parts of a conversation.

    Attributes:
        parts: The parts, in the order of the conversation.
    """

    def __init__(self, only: int | None = None):
        """Makes a marker.

        Args:
            only: Index of the only part that gets its mark; None: all do.
        """
        self.parts: list[_Part] = []
        self._only = only

    def conversation(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the variables of a template with marks in messages and tools."""
        marked = dict(values)
        marked["messages"] = [
            self._message(i, message) if isinstance(message, dict) else message
            for i, message in enumerate(values["messages"])
        ]
        if isinstance(values.get("tools"), list):
            marked["tools"] = list(map(self._tool, values["tools"]))
        return marked

    def _message(self, i: int, message: dict[str, Any]) -> dict[str, Any]:
        calls, content = message.get("tool_calls"), message.get("content")
        where = f"message {i} ({message.get('role')})"
        has_text = isinstance(content, str) and bool(content.strip())
        if isinstance(calls, list) and calls:
            cure = _TEXT_CURE if has_text else _CALL_CURE
            message = {
                **message,
                "tool_calls": [self._call(c, i, where, cure) for c in calls],
            }
            if has_text:
                what = f"the text {content!r:.80} beside the calls of {where}"
                message["content"] = self._mark(content, what, _TEXT_CURE, i)
        elif has_text and message.get("role") not in _PLAIN_ROLES:
            what = f"the content {content!r:.80} of {where}"
            marked = self._mark(content, what, _RESULT_CURE, is_result=True)
            message = message | {"content": marked}
        return message

    def _call(self, call: Any, i: int, where: str, cure: str) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return call | {"function": self._call(call["function"], i, where, cure)}
        of = f"the call of {call.get('name')!r:.80} in {where}"
        call = dict(call)
        if isinstance(call.get("name"), str):
            call["name"] = self._mark(call["name"], f"the name of {of}", cure, i)
        if isinstance(call.get("arguments"), dict) and call["arguments"]:
            call["arguments"] = Arguments(
                {
                    key: self._value(
                        value, f"the argument {key!r:.80} of {of}", cure, i
                    )
                    for key, value in call["arguments"].items()
                }
            )
        return call

    def _value(self, value: Any, what: str, cure: str, i: int) -> Any:
        if isinstance(value, dict) and value:
            return {k: self._value(v, what, cure, i) for k, v in value.items()}
        if isinstance(value, list) and value:
            return [self._value(item, what, cure, i) for item in value]
        return self._mark(value, what, cure, i)

    def _tool(self, tool: Any) -> Any:
        if not isinstance(tool, dict):
            return tool
        if isinstance(tool.get("function"), dict):
            return tool | {"function": self._tool(tool["function"])}
        name = tool.get("name")
        if not isinstance(name, str):
            return tool
        what = f"the tool {name!r:.80}"
        return tool | {"name": self._mark(name, what, _TOOL_CURE)}

    def _mark(
        self,
        value: Any,
        what: str,
        cure: str,
        caller: int | None = None,
        *,
        is_result: bool = False,
    ) -> Any:
        """Notes a part, and returns its value with a mark."""
        number = len(self.parts)
        mark = f"{_TEXT_MARK}{number}_"
        marked: Any = mark
        if isinstance(value, str):
            marked = value + mark
        elif isinstance(value, int | float) and not isinstance(value, bool):
            # A template may format numbers in another way than text.
            marked = _NUMBER_MARK + number + (0.5 if isinstance(value, float) else 0)
            mark = str(marked)
        self.parts.append(_Part(what, value, mark, cure, caller, is_result))
        return marked if self._only in (None, number) else value


def check_parts(
    template: ChatTemplate,
    values: Mapping[str, Any],
    text: str,
    trained: Iterable[int] = (),
) -> None:
    """Checks that a template prints all calls, the text beside them, results and tools.

    Args:
        template: The chat template.
        values: Its variables, including `messages`.
        text: What it prints.
        trained: Indices of the messages whose turns are trained on.

    Raises:
        LostPartError: A part is not printed.
        UnclearTurnError: A result is printed within a turn that is trained on.
    """
    if "tools" not in template.names:
        values = {**values, "tools": None}
    marker = _Marker()
    marked = marker.conversation(values)
    if not marker.parts:
        return
    rendering = _render(template, marked)
    for number, part in enumerate(marker.parts):
        is_printed = rendering is not None and part.mark in rendering.of(part.caller)
        if not is_printed and not _is_printed_alone(template, values, number, text):
            raise LostPartError(
                f"the chat template does not print {part.what}. {part.cure}"
            )

    if rendering is not None:
        _check_turns(rendering, marker.parts, trained)


def _check_turns(
    rendering: "_Rendering", parts: Sequence[_Part], trained: Iterable[int]
) -> None:
    """Checks that no result is printed within a turn that is trained on."""
    results = [part for part in parts if part.is_result]
    for i in trained:
        turn = rendering.of(i) if i in rendering.turns else ""
        for part in results:
            if part.mark in turn:
                raise UnclearTurnError(
                    f"the turn of message {i} is unclear: the template prints "
                    f"{part.what} in it"
                )


def _is_printed_alone(
    template: ChatTemplate, values: Mapping[str, Any], number: int, text: str
) -> bool:
    """Whether a part is printed, judged by a rendering with no other mark."""
    marker = _Marker(only=number)
    marked = _render(template, marker.conversation(values))
    part = marker.parts[number]
    if marked is not None and part.mark in marked.of(part.caller):
        return True
    if marked is not None and marked.text == text:
        return False
    # The template takes another path for the marked value: it may look up a tool by
    # its name, or format numbers.
    plain = _render(template, values)
    if plain is None or not isinstance(part.value, str):
        return plain is not None
    as_json = (
        json.dumps(part.value, ensure_ascii=is_ascii) for is_ascii in (True, False)
    )
    forms = (part.value.strip(), *(form[1:-1] for form in as_json))
    return any(form in plain.of(part.caller) for form in forms)


@dataclasses.dataclass(frozen=True, slots=True)
class _Rendering:
    """A rendered conversation.

    Attributes:
        text: All of it.
        turns: Known spans that each message printed.
    """

    text: str
    turns: Mapping[int, Sequence[Span]]

    def of(self, message: int | None) -> str:
        """Returns the text that a message printed; all text if that is unknown."""
        spans = None if message is None else self.turns.get(message)
        if spans is None:
            return self.text
        return "\0".join(self.text[start:end] for start, end in spans)


def _render(template: ChatTemplate, values: Mapping[str, Any]) -> _Rendering | None:
    """Renders a conversation; None if the template refuses it."""
    try:
        text = template.render(values)
        trace = template.trace(values, text)
    except MemoryError:
        raise
    # A template may raise any error on values that it does not expect.
    except Exception:
        return None
    return _Rendering(text, trace.turns if trace else {})

"""Finds what a chat template leaves out of a conversation.

A template may ignore a role, cut the thoughts out of an answer, or print calls of tools
only in messages without text. If all texts of a conversation are found in what it
prints, one after the other, none is lost. Otherwise a search says too little: a short
text may be found anywhere, and templates print calls in many forms. So the conversation
is rendered once more, with a mark behind each piece of text, name and value, and the
marks are searched for. This runs in the process of `template_worker`.
"""

import dataclasses
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxlora.data.templates.call_arguments import Arguments
from jaxlora.data.templates.sandbox import ChatTemplate, Span
from jaxlora.data.templates.turns import UnclearTurnError

# Capitals show that a template does not change them.
_TEXT_MARK = f"Zq_{secrets.token_hex(4)}_"
_ANY_MARK = re.compile(f"{_TEXT_MARK}[0-9]+_")
_NUMBER_MARK = 10**13 + secrets.randbelow(10**8) * 10**5
_PLAIN_ROLES = ("system", "developer", "user", "assistant")
# Keys of messages that hold the thoughts before an answer.
_THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
_THOUGHT_END = re.compile(
    r"</think(?:ing)?>|</thought>|</reasoning>|</seed:think>|\[/THINK\]"
    r"|<\|END_THINKING\|>|<channel\|>"
)
# Marks are put between these, as templates search for tags and strip line breaks.
_SEPARATOR = re.compile(r"(<[^<>\s]{1,60}>|\[/?[A-Z_]{1,60}\]|\n+)")
# Variables of templates that keep thoughts, and their values.
_KEEPING = {"preserve_thinking": True, "clear_thinking": False, "enable_thinking": True}

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
_ROLE_CURE = (
    "Give the text in a message that the template prints, or use a template that "
    "prints it (data.chat_template)"
)
_ANSWER_CURE = (
    "set data.chat_template to a template that prints it, such as one of TRL for "
    "training (in trl/chat_templates: qwen3_training.jinja, deepseek_r1_distill_"
    "training.jinja and others); or do not train on the answer, which may have the "
    "weight 0"
)
_EARLIER = " (data.loss_on: last leaves out all but the last)"


class LostPartError(Exception):
    """A template leaves out a part of a conversation; the error says which."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A part of a conversation that has to be printed.

    Attributes:
        what: Describes it, with {} for a text.
        value: The text, number, bool or null, or an empty list or object.
        mark: What is printed if the marked value is printed.
        cure: What to do if it is not printed.
        caller: Index of the message that has to print it; None: any message may.
        is_result: Whether it is the content of a message that is not trained on.
        message: Index of the message that it is a piece of text of; None: it is none.
        is_thought: Whether it is a piece of the thoughts before an answer.
    """

    what: str
    value: Any
    mark: str
    cure: str
    caller: int | None = None
    is_result: bool = False
    message: int | None = None
    is_thought: bool = False

    def __str__(self) -> str:
        if self.message is None:
            return self.what
        return self.what.replace("{}", f"{self.value!r:.80}", 1)


class _Marker:
    """Puts marks behind the parts of a conversation.

    Attributes:
        parts: The parts, in the order of the conversation.
    """

    def __init__(self, template: ChatTemplate, only: int | None = None):
        """Makes a marker.

        Args:
            template: The chat template.
            only: Index of the only part that gets its mark; None: all do.
        """
        self.parts: list[_Part] = []
        self._template = template
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
        calls, where = message.get("tool_calls"), f"message {i} ({message.get('role')})"
        texts = _texts(self._template, message)
        is_result = "content" in texts and _is_result(message)
        kind, cure, caller = "the text {} of", _ROLE_CURE, None
        marked = dict(message)
        if isinstance(calls, list) and calls:
            kind, cure, caller = "the text {} beside the calls of", _TEXT_CURE, i
            own = _TEXT_CURE if "content" in texts else _CALL_CURE
            marked["tool_calls"] = [self._call(c, i, where, own) for c in calls]
        elif is_result:
            kind, cure = "the content {} of", _RESULT_CURE
        known: dict[str, int] = {}
        for key, text in texts.items():
            part = _Part(f"{kind} {where}", "", "", cure, caller, is_result, i)
            end = len(text)
            if key == "content":
                end = max((m.start() for m in _THOUGHT_END.finditer(text)), default=0)
            is_answer = message.get("role") == "assistant"
            marked[key] = self._text(text, part, known, end if is_answer else 0)
        return marked

    def _text(self, text: str, part: _Part, known: dict[str, int], end: int) -> str:
        """Returns a text with a mark behind each of its pieces.

        Args:
            text: The text.
            part: Describes the pieces, with {} for their texts.
            known: The part of each piece so far, by its text. Pieces of equal text have
                one mark, as thoughts may be given twice, of which one is printed.
            end: Where the thoughts in the text end.
        """
        same = part.cure, part.caller, part.is_result, part.message
        pieces, at = _SEPARATOR.split(text), 0
        if not any(piece.strip() for piece in pieces[::2]):
            pieces = [text]
        for i, piece in enumerate(pieces):
            at += len(piece)
            shown = piece.strip()
            if i % 2 or not shown:
                continue
            if (number := known.get(shown)) is None:
                number = known[shown] = len(self.parts)
                mark, is_thought = f"{_TEXT_MARK}{number}_", at <= end
                self.parts.append(_Part(part.what, shown, mark, *same, is_thought))
            if self._only in (None, number):
                # Templates strip spaces at the ends of texts.
                head = piece.rstrip()
                pieces[i] = head + self.parts[number].mark + piece[len(head) :]
        return "".join(pieces)

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

    def _mark(self, value: Any, what: str, cure: str, caller: int | None = None) -> Any:
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
        self.parts.append(_Part(what, value, mark, cure, caller))
        return marked if self._only in (None, number) else value


def _texts(template: ChatTemplate, message: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of a message that have to be printed, thoughts first."""
    keys = [key for key in _THOUGHT_KEYS if key in message and template.mentions(key)]
    texts = {key: message.get(key) for key in (*keys, "content")}
    return {k: t for k, t in texts.items() if isinstance(t, str) and t.strip()}


def _is_result(message: Mapping[str, Any]) -> bool:
    return message.get("role") not in _PLAIN_ROLES


def _has_tools(values: Mapping[str, Any]) -> bool:
    """Whether a conversation has tools, their calls, or results."""
    messages = [m for m in values["messages"] if isinstance(m, dict)]
    has_calls = any(m.get("tool_calls") or _is_result(m) for m in messages)
    return has_calls or bool(values.get("tools"))


def _prints_all(template: ChatTemplate, values: Mapping[str, Any], text: str) -> bool:
    """Whether the texts of all messages are surely printed, one after the other.

    A text that the template may print by itself is never sure.
    """
    messages, at = values["messages"], 0
    others = [value for value in values.values() if isinstance(value, str)]
    others += {str(message.get("role")) for message in messages}
    own = template.literals + "\0".join(others)
    for message in messages:
        for one in _texts(template, message).values():
            one = one.strip()
            at = text.find(one, at)
            if at < 0 or one in own or one.isdecimal():
                return False
            at += len(one)
    return True


def check_parts(
    template: ChatTemplate,
    values: Mapping[str, Any],
    text: str,
    trained: Iterable[int] = (),
    *,
    has_turns: bool = False,
) -> int:
    """Checks that a template prints all texts, calls, results and tools.

    It may leave out the thoughts of answers that are not trained on, as it does then
    when it serves the model.

    Args:
        template: The chat template.
        values: Its variables, including `messages`.
        text: What it prints.
        trained: Indices of the answers that are trained on.
        has_turns: Whether the turns of these are what is trained on, so they must not
            contain results.

    Returns:
        The number of answers whose thoughts it leaves out.

    Raises:
        LostPartError: A part is not printed.
        UnclearTurnError: A result is printed within a turn that is trained on.
    """
    if "tools" not in template.names:
        values = {**values, "tools": None}
    has_tools = _has_tools(values)
    if not has_tools and _prints_all(template, values, text):
        return 0
    marker = _Marker(template)
    marked = marker.conversation(values)
    if not marker.parts:
        return 0
    rendering = _render(template, marked, with_turns=has_tools)
    lost = _lost_parts(template, values, text, marker.parts, rendering)
    trained, thoughtless = set(trained), set()
    for part in lost:
        if not part.is_thought or part.message in trained:
            raise _error(part, template, values, trained)
        thoughtless.add(part.message)
    if rendering is not None and has_turns:
        _check_turns(rendering, marker.parts, trained)
    return len(thoughtless)


def _error(
    part: _Part, template: ChatTemplate, values: Mapping[str, Any], trained: set[int]
) -> LostPartError:
    why, cure = f"the chat template does not print {part}", part.cure
    is_trained = part.message in trained
    if is_trained:
        why += ", which is trained on"
    if is_trained and (part.is_thought or cure == _ROLE_CURE):
        cure = _ANSWER_CURE
        if part.message != max(trained):
            cure += _EARLIER
    if part.message is not None:
        for change, changed in _changes(template, values, part.message):
            if _prints(template, changed, part):
                cure = f"{change}; or {cure[0].lower()}{cure[1:]}"
    return LostPartError(f"{why}. {cure[0].upper()}{cure[1:]}")


def _changes(
    template: ChatTemplate, values: Mapping[str, Any], i: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields changes by which a template may print all of message `i`.

    Each is in words, with the variables of the template that it gives.
    """
    message = values["messages"][i]
    for key, value in _KEEPING.items():
        if key in template.names and values.get(key) != value:
            setting = f"{{{key}: {str(value).lower()}}}"
            yield f"set data.chat_template_kwargs to {setting}", {**values, key: value}
    role = message.get("role")
    wanted = {"developer": "system"}.get(role, "tool")
    if role == "developer" or role not in (*_PLAIN_ROLES, wanted):
        renamed = [
            {**one, "role": wanted} if one.get("role") == role else one
            for one in values["messages"]
        ]
        change = f"set data.roles to {{{role}: {wanted}}}"
        yield change, {**values, "messages": renamed}
    keys = [key for key in _THOUGHT_KEYS if key in message]
    for new in _THOUGHT_KEYS:
        if len(keys) == 1 and new not in message and template.mentions(new):
            renamed = [*values["messages"]]
            renamed[i] = {new if k in keys else k: v for k, v in message.items()}
            change = f"rename the key {keys[0]!r} of the messages to {new!r}"
            yield change, {**values, "messages": renamed}


def _prints(template: ChatTemplate, values: Mapping[str, Any], part: _Part) -> bool:
    """Whether a template prints a piece of text with other variables."""
    marker = _Marker(template)
    rendering = _render(template, marker.conversation(values), with_turns=False)
    return rendering is not None and any(
        (one.message, one.value) == (part.message, part.value) and rendering.has(one)
        for one in marker.parts
    )


def _lost_parts(
    template: ChatTemplate,
    values: Mapping[str, Any],
    text: str,
    parts: Sequence[_Part],
    rendering: "_Rendering | None",
) -> Iterator[_Part]:
    """Yields the parts that are not printed, but at most one thought of a message.

    Args:
        template: The chat template.
        values: Its variables, including `messages`.
        text: What it prints for them.
        parts: The parts.
        rendering: What it prints if all of them are marked.
    """
    # If the marks change nothing else, those that are missing were not printed.
    is_sure = rendering is not None and _ANY_MARK.sub("", rendering.text) == text
    thoughtless = set()
    for number, part in enumerate(parts):
        if part.is_thought and part.message in thoughtless:
            continue
        if rendering is not None and rendering.has(part):
            continue
        is_known = is_sure and part.message is not None
        if not is_known and _is_printed_alone(template, values, number, text):
            continue
        if part.is_thought:
            thoughtless.add(part.message)
        yield part


def _check_turns(
    rendering: "_Rendering", parts: Sequence[_Part], trained: Iterable[int]
) -> None:
    """Checks that no result is printed within a turn that is trained on."""
    results = [part for part in parts if part.is_result]
    for i in trained:
        marks = rendering.marks_of(i) if i in rendering.turns else ()
        for part in results:
            if part.mark in marks:
                raise UnclearTurnError(
                    f"the turn of message {i} is unclear: the template prints "
                    f"{part} in it"
                )


def _is_printed_alone(
    template: ChatTemplate, values: Mapping[str, Any], number: int, text: str
) -> bool:
    """Whether a part is printed, judged by a rendering with no other mark."""
    marker = _Marker(template, only=number)
    marked = _render(template, marker.conversation(values))
    part = marker.parts[number]
    if marked is not None and marked.has(part):
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
        marks: The marks that each message printed, as far as they were asked for.
    """

    text: str
    turns: Mapping[int, Sequence[Span]]
    marks: dict[int | None, frozenset[str]] = dataclasses.field(default_factory=dict)

    def has(self, part: _Part) -> bool:
        """Whether a part was printed, by its message if that is known."""
        if part.mark.startswith(_TEXT_MARK):
            return part.mark in self.marks_of(part.caller)
        return part.mark in self.of(part.caller)

    def marks_of(self, message: int | None) -> frozenset[str]:
        """Returns the marks of texts that a message printed; all, if unknown."""
        if message not in self.marks:
            self.marks[message] = frozenset(_ANY_MARK.findall(self.of(message)))
        return self.marks[message]

    def of(self, message: int | None) -> str:
        """Returns the text that a message printed; all text if that is unknown."""
        spans = None if message is None else self.turns.get(message)
        if spans is None:
            return self.text
        return "\0".join(self.text[start:end] for start, end in spans)


def _render(
    template: ChatTemplate, values: Mapping[str, Any], *, with_turns: bool = True
) -> _Rendering | None:
    """Renders a conversation; None if the template refuses it."""
    try:
        text = template.render(values)
        trace = template.trace(values, text) if with_turns else None
    except MemoryError:
        raise
    # A template may raise any error on values that it does not expect.
    except Exception:
        return None
    return _Rendering(text, trace.turns if trace else {})

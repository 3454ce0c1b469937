"""Checks a record's messages, and converts them for chat templates."""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.data.records.tool_calls import read_calls, read_said_calls
from jaxlora.data.records.values import check_text, without_nulls
from jaxlora.errors import DataError

Message = dict[str, Any]

# Advice for records without a message of the assistant.
RENAME_CURE = (
    "If the assistant has another name there, set data.roles to {NAME: assistant}; if "
    "not, remove the record"
)

SYSTEM_ROLES = ("system", "developer")

# The roles of ShareGPT's speakers, in lower case; other names of speakers are roles
# themselves. Some data sets have these names as values of `role`.
_ROLE_OF_SPEAKER = {
    **{role: role for role in (*SYSTEM_ROLES, "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
}
_CALLING_SPEAKERS = ("function_call", "tool_call")


# Bounds of weights, within which float32 holds products of them exactly enough.
_SMALLEST, _LARGEST = 1e-4, 1e4


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation to render.

    Attributes:
        messages: {role, content} messages. The content is null where a message only
            calls tools.
        weights: For each message the weight of its loss; 0: it is not trained on.
        tools: The tools that the assistant may call, or None.
    """

    messages: Sequence[Message]
    weights: Sequence[float]
    tools: list[Any] | None = None


def read_messages(
    messages: Any,
    field: str,
    *,
    is_columnar: bool,
    roles: Mapping[str, str] = types.MappingProxyType({}),
    start: int = 0,
) -> Conversation:
    """Reads a record's messages, but not its tools.

    Args:
        messages: A list of {role, content}, or {from, value} as in ShareGPT. The
            content is text, or a list of {type: text, text} parts. The value of a
            `function_call` is JSON text.
        field: Name of their field, for errors.
        is_columnar: Whether null stands for an absent key, at any depth.
        roles: Roles of the chat template, by the role or speaker in the record.
        start: Index of the first one in the field.

    Raises:
        DataError: They are not a list of messages.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"field {field!r} is {messages!r:.80}, not a list of messages. Write "
            '[{"role": "user", "content": ...}, ...].'
        )
    if is_columnar:
        messages = without_nulls(messages)
    read = [
        _read_message(message, f"{field}[{i}]", roles)
        for i, message in enumerate(messages, start)
    ]
    return Conversation([one for one, _ in read], [weight for _, weight in read])


def without_earlier_answers(conversation: Conversation) -> Conversation:
    """Returns a conversation of which only the assistant's last message is trained."""
    answers = list(map(_is_answer, conversation.messages))
    last = max((i for i, is_answer in enumerate(answers) if is_answer), default=0)
    weights = [
        0.0 if is_answer and i != last else weight
        for i, (is_answer, weight) in enumerate(
            zip(answers, conversation.weights, strict=True)
        )
    ]
    return dataclasses.replace(conversation, weights=weights)


def with_system(conversation: Conversation, text: str) -> Conversation:
    """Returns a conversation that begins with a system message."""
    messages = [{"role": "system", "content": text}, *conversation.messages]
    return Conversation(messages, [1.0, *conversation.weights])


def join_prompt(
    prompt: Conversation, completion: Conversation, *, is_prompt_trained: bool
) -> Conversation:
    """Joins the messages of a prompt and of its completion.

    Args:
        prompt: The messages of the prompt.
        completion: The messages of the completion.
        is_prompt_trained: Whether answers of the assistant in the prompt are trained
            on, too.

    Raises:
        DataError: There is no answer in the completion.
    """
    if not any(map(_is_answer, completion.messages)):
        roles = ", ".join(message["role"] for message in completion.messages)
        raise DataError(
            "the completion has no message with the role 'assistant', so there is "
            f"nothing to learn (roles: {roles}). {RENAME_CURE}."
        )
    weights = prompt.weights
    if not is_prompt_trained:
        pairs = zip(prompt.messages, weights, strict=True)
        weights = [0.0 if _is_answer(one) else weight or 1.0 for one, weight in pairs]
    messages = [*prompt.messages, *completion.messages]
    return Conversation(messages, [*weights, *completion.weights])


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant"


def _read_message(
    message: Any, where: str, roles: Mapping[str, str]
) -> tuple[Message, float]:
    """Checks a message; returns it without its weight, and the weight."""
    if isinstance(message, dict) and {"from", "value"} <= message.keys():
        message = _from_speaker(message, where, ("from", "value"), roles)
    elif isinstance(message, dict) and "role" in message:
        message = _from_speaker(message, where, ("role", "content"), roles)
    if not isinstance(message, dict) or "role" not in message:
        raise DataError(
            f"{where} is {message!r:.80}, not a message. Write "
            '{"role": "user", "content": ...}.'
        )
    # Templates test if a key exists, so a key with null is removed.
    message = {key: value for key, value in message.items() if value is not None}
    check_text(message.get("role"), f"{where}.role")
    weight = _read_weight(message.pop("weight", 1), f"{where}.weight")
    calls = message.pop("tool_calls", None)
    if calls:
        calls = read_calls(calls, f"{where}.tool_calls")
        message.setdefault("content", None)
    if calls:
        message["tool_calls"] = calls
    _check_content(message, where)
    content = _read_content(message["content"], f"{where}.content")
    if message["role"] == "assistant" and not (content or calls) and weight:
        raise DataError(
            f"{where} is an empty answer of the assistant, so there is nothing to "
            "learn. Remove the message or the record, or give it the weight 0."
        )
    # Templates know by null, and not by an empty text, that a message only calls tools.
    message["content"] = content or (None if calls else "")
    return message, weight


def _check_content(message: Message, where: str) -> None:
    if message.get("function_call"):
        raise DataError(
            f"{where} has function_call, which OpenAI has replaced by tool_calls. "
            'Write "tool_calls": [{"type": "function", "function": {"name": ..., '
            "\"arguments\": ...}}], and give the results of calls the role 'tool'."
        )
    if "content" not in message:
        raise DataError(
            f"{where} has no content (keys: {', '.join(map(str, message))}). Write "
            '{"role": ..., "content": ...} or {"from": ..., "value": ...}.'
        )


def _from_speaker(
    message: Message, where: str, keys: tuple[str, str], roles: Mapping[str, str]
) -> Message:
    """Converts {from, value} to {role, content}, and ShareGPT's names of speakers.

    Args:
        message: The message; its other keys stay.
        where: Its place in the record, for errors.
        keys: Names of the speaker and of the content.
        roles: Roles of the chat template, by the role or speaker in the record.
    """
    names = dict(zip(keys, ("role", "content"), strict=True))
    message = {
        names.get(key, key): value
        for key, value in message.items()
        if key in names or key not in names.values()
    }
    given = message["role"]
    # A chat template with such a role keeps it by an entry in `roles` of its own name.
    if not isinstance(given, str) or roles.get(given) == given:
        return message
    speaker = roles.get(given, given)
    if speaker.lower() in _CALLING_SPEAKERS and "content" in message:
        calls = read_said_calls(message["content"], f"{where}.{keys[1]}")
        return {"tool_calls": calls, **message, "role": "assistant", "content": None}
    return {**message, "role": _ROLE_OF_SPEAKER.get(speaker.lower(), speaker)}


def _read_weight(weight: Any, where: str) -> float:
    is_number = isinstance(weight, int | float)
    if not is_number or not (weight == 0 or _SMALLEST <= weight <= _LARGEST):
        raise DataError(
            f"{where} is {weight!r:.80}. Write 1 to train on the message, 0 not to, or "
            f"another number from {_SMALLEST:g} to {_LARGEST:g}, by which its loss is "
            "multiplied."
        )
    return float(weight)


def _read_content(content: Any, where: str) -> str:
    """Returns the text of a message, "" for null; the parts of a list are joined."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return check_text(content, where)
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") not in (None, "text"):
            raise DataError(
                f"{where}[{i}] is a part of type {part['type']!r:.80}. Only text can "
                "be trained on: remove the part or the record."
            )
        if not isinstance(part, dict) or part.get("type") != "text":
            raise DataError(
                f"{where}[{i}] is {part!r:.80}, of type {type(part).__name__}, not a "
                'string or a {"type": "text", "text": ...} part. Only text can be '
                "trained on: remove the part or the record."
            )
        texts.append(check_text(part.get("text"), f"{where}[{i}].text"))
    return "".join(texts)

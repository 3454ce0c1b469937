"""A record as text: what is read, and which characters are to be learned."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jinja2

from jaxlora.config import DataConfig
from jaxlora.data.read import Record
from jaxlora.data.template import record_template
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.errors import DataError

Kind = Literal["prompt_completion", "messages", "text"]
Message = dict[str, Any]
Span = tuple[int, int]

_ROLE_OF_SPEAKER = {"human": "user", "gpt": "assistant"}


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A prompt, and the completion to be learned."""

    prompt: str
    completion: str


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """A rendered conversation, and the spans of characters to be learned."""

    text: str
    target_spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Plain:
    """Text to be learned as a whole."""

    text: str


Rendered = Pair | Chat | Plain


def make_renderer(
    data: DataConfig, first: Record, tokenizer: Tokenizer
) -> Callable[[Record], Rendered]:
    """Chooses how records become text.

    Args:
        data: What the user said of the records.
        first: The first record, whose fields decide where `data.kind` is `auto`.
        tokenizer: Brings the chat template.

    Returns:
        The function from a record to text. It raises a DataError without the record's
        number, which the caller knows.

    Raises:
        DataError: The kind cannot be told, or options contradict it.
    """
    kind = choose_kind(data, first)
    if data.chat and kind != "prompt_completion":
        raise DataError(
            "chat=true wraps prompt and completion, but the records are read as "
            f"{kind}. Remove data.chat, or set data.kind to prompt_completion."
        )
    if data.system is not None and not data.chat:
        raise DataError(
            f"system={data.system!r} is used only with data.chat. Set data.chat to "
            "true, or remove data.system."
        )
    if kind == "text":
        return lambda record: Plain(_field(record, data.text))
    if kind == "messages":
        return lambda record: _render_messages(
            _read_messages(record, data.messages), data, tokenizer
        )
    if data.chat:
        return lambda record: _render_messages(_wrap(record, data), data, tokenizer)
    return lambda record: _read_pair(record, data)


def choose_kind(data: DataConfig, first: Record) -> Kind:
    """The kind of the records: as said, else by the first record's fields.

    Where several kinds fit, one whose fields the user renamed goes first.

    Raises:
        DataError: No kind fits, or more than one.
    """
    if data.kind != "auto":
        return data.kind
    fields: dict[Kind, tuple[str, ...]] = {
        "prompt_completion": ("prompt", "completion"),
        "messages": ("messages",),
        "text": ("text",),
    }
    fits = [
        kind
        for kind, keys in fields.items()
        if all(
            _is_template(getattr(data, k)) or getattr(data, k) in first for k in keys
        )
    ]
    defaults = DataConfig.model_fields
    renamed = [
        kind
        for kind in fits
        if any(getattr(data, k) != defaults[k].default for k in fields[kind])
    ]
    choice = renamed or fits
    if len(choice) == 1:
        return choice[0]
    found = ", ".join(map(str, first)) or "none"
    if choice:
        raise DataError(
            f"records can be read as {' or as '.join(choice)} (fields found: {found}). "
            "Set data.kind to the one that is meant."
        )
    raise DataError(
        f"records have the fields {found}; wanted are {data.prompt!r} and "
        f"{data.completion!r}, or {data.messages!r}, or {data.text!r}. Name the fields "
        "in data.prompt and data.completion, data.messages or data.text."
    )


def _is_template(source: str) -> bool:
    return "{{" in source


def _field(record: Record, source: str) -> str:
    """The field that `source` names, or what `source` renders to as a template."""
    if _is_template(source):
        text = _render_fields(record, source)
    elif source in record:
        text = record[source]
    else:
        found = ", ".join(map(str, record)) or "none"
        raise DataError(
            f"field {source!r} is missing (fields found: {found}). Add it, or name "
            "another field in data."
        )
    return _check_text(text, f"field {source!r}")


def _render_fields(record: Record, source: str) -> str:
    try:
        return record_template(source).render(record)
    # A template may raise anything.
    except Exception as error:
        where = "does not parse" if _is_syntax(error) else "failed"
        raise DataError(
            f"the template {source!r} {where} ({type(error).__name__}: {error}; fields "
            f"found: {', '.join(map(str, record)) or 'none'}). Correct the template."
        ) from error


def _is_syntax(error: Exception) -> bool:
    return isinstance(error, jinja2.TemplateSyntaxError)


def _check_text(text: Any, what: str) -> str:
    if not isinstance(text, str):
        raise DataError(
            f"{what} is {text!r:.80}, of type {type(text).__name__}, not a string. "
            "Store it as text, or use a template such as '{{ field }}'."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} holds half of a surrogate pair at character {error.start}, which "
            "is no text. Remove it."
        ) from error
    return text


def _read_pair(record: Record, data: DataConfig) -> Pair:
    prompt = _field(record, data.prompt)
    completion = _field(record, data.completion)
    if not completion:
        raise DataError(
            f"completion {data.completion!r} is empty, so there is nothing to learn. "
            "Remove the record."
        )
    return Pair(prompt, completion)


def _wrap(record: Record, data: DataConfig) -> list[Message]:
    pair = _read_pair(record, data)
    system = [] if data.system is None else [{"role": "system", "content": data.system}]
    return [
        *system,
        {"role": "user", "content": pair.prompt},
        {"role": "assistant", "content": pair.completion},
    ]


def _read_messages(record: Record, field: str) -> list[Message]:
    if field not in record:
        _field(record, field)  # raises: the field is missing
    messages = record[field]
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"field {field!r} is {messages!r:.80}, not a list of messages. Write "
            '[{"role": "user", "content": ...}, ...].'
        )
    return [_read_message(m, f"{field}[{i}]") for i, m in enumerate(messages)]


def _read_message(message: Any, where: str) -> Message:
    """Checks a message; {from, value} becomes {role, content}."""
    if isinstance(message, dict) and {"from", "value"} <= message.keys():
        speaker = message["from"]
        role = _ROLE_OF_SPEAKER.get(speaker, speaker)
        message = {"role": role, "content": message["value"]}
    if not isinstance(message, dict) or "role" not in message:
        raise DataError(
            f"{where} is {message!r:.80}, not a message. Write "
            '{"role": "user", "content": ...}.'
        )
    # Columnar files fill absent keys with null, and templates ask if a key is there.
    message = {key: value for key, value in message.items() if value is not None}
    _check_text(message.get("role"), f"{where}.role")
    if message.get("tool_calls") and "content" not in message:
        return message | {"content": ""}
    content = _check_text(message.get("content"), f"{where}.content")
    if message["role"] == "assistant" and not content and not message.get("tool_calls"):
        raise DataError(
            f"{where} is an empty answer of the assistant, so there is nothing to "
            "learn. Remove the message or the record."
        )
    return message


def _render_messages(
    messages: list[Message], data: DataConfig, tokenizer: Tokenizer
) -> Chat:
    text = _check_text(tokenizer.render_chat(messages), "the rendered chat")
    if data.loss_on == "all":
        return Chat(text, ((0, len(text)),))
    return Chat(text, _assistant_spans(messages, text, tokenizer))


def _assistant_spans(
    messages: list[Message], text: str, tokenizer: Tokenizer
) -> tuple[Span, ...]:
    """Where the assistant's answers are, each with what ends its turn.

    An answer begins where the messages before it end, with the generation prompt, as
    in inference; it ends where the messages up to it end, less trailing space.
    """
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.render_chat(messages[:i], add_generation_prompt=True)
        is_last = i + 1 == len(messages)
        through = text if is_last else tokenizer.render_chat(messages[: i + 1])
        start, end = (
            len(before),
            _turn_end(text, before, through, message["content"].strip()),
        )
        if end is None or not text.startswith(before):
            raise DataError(
                f"the chat template is not prefix-stable: message {i} (assistant) "
                "renders otherwise within the whole conversation than at its end, so "
                "its tokens cannot be told. Set data.loss_on to all, or use a template "
                "that does not rewrite earlier messages."
            )
        spans.append((start, start + len(text[start:end].rstrip())))
    if not spans:
        raise DataError(
            "no message has the role 'assistant', so there is nothing to learn (roles: "
            f"{', '.join(m['role'] for m in messages)}). Remove the record, or set "
            "data.loss_on to all."
        )
    return tuple(spans)


def _turn_end(text: str, before: str, through: str, content: str) -> int | None:
    """Where in `text` the turn ends that `through` ends with; None if unknown."""
    if text.startswith(through):
        return len(through)
    # Templates of reasoning models put an empty <think> block before the last answer
    # only. Then an earlier answer, with what ends its turn, directly follows `before`.
    answer = through[through.rfind(content) :] if content in through else None
    if answer and text.startswith(answer, len(before)):
        return len(before) + len(answer)
    return None

"""Renders records as text, and marks the target characters."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from jaxlora.config import DataConfig
from jaxlora.data.records.messages import (
    SYSTEM_ROLES,
    Conversation,
    join_prompt,
    read_messages,
    with_system,
    without_earlier_answers,
)
from jaxlora.data.records.notes import Notes
from jaxlora.data.records.read import Record
from jaxlora.data.records.tool_calls import read_tools
from jaxlora.data.records.values import check_text
from jaxlora.data.rendering.fields import (
    Field,
    SystemMessages,
    UnusedFields,
    missing_field,
)
from jaxlora.data.rendering.kinds import Reading
from jaxlora.data.rendering.prompts import (
    AlpacaPrompts,
    FieldPrompts,
    PromptCompletion,
    PromptReader,
)
from jaxlora.data.templates.chat import Chat
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.errors import DataError

# Keys that change the meaning of a message, if the chat template reads them.
_SIGNIFICANT_KEYS = (
    "reasoning_content",
    "reasoning",
    "reasoning_text",
    "thinking",
    "thinking_content",
    "thought",
    "thoughts",
    "images",
    "train",
    "training",
    "train_on",
    "train_on_turn",
    "loss",
    "mask",
)


_OWN_SYSTEM = "the record's own system message is used, not that of data.system"


@dataclasses.dataclass(frozen=True, slots=True)
class PlainText:
    """A text that is trained on completely."""

    text: str


Rendered = PromptCompletion | Chat | PlainText


Renderer = Callable[[Sequence[Record]], "list[Rendered | DataError]"]


def plain_renderer(
    data: DataConfig, reading: Reading, tokenizer: Tokenizer, notes: Notes
) -> Renderer:
    """Chooses how records that are one text each become this text.

    The arguments are those of `make_renderer`.
    """
    is_chat = reading.kind == "messages" or reading.has_messages
    if data.chat and (is_chat or reading.kind == "text"):
        raise DataError(
            "chat=true wraps prompt and completion, but the records are read as "
            f"{reading}. Remove data.chat, or set data.kind to prompt_completion."
        )
    is_wrapped = data.chat or reading.is_chat
    for name, what in (
        ("system", f"system={data.system!r} is"),
        ("chat_template", "chat_template is"),
        ("chat_template_kwargs", "chat_template_kwargs are"),
    ):
        if getattr(data, name) in (None, {}) or is_chat or is_wrapped:
            continue
        is_text = reading.kind == "text"  # a chat has a prompt
        cure = "Remove" if is_text else "Set data.chat to true, or remove"
        raise DataError(
            f"{what} for chats, and the records are read as {reading}. {cure} "
            f"data.{name}."
        )
    if data.roles and not is_chat:
        raise DataError(
            f"roles are those of messages, and the records are read as {reading}. "
            "Remove data.roles."
        )
    unused = UnusedFields(notes)
    if is_chat:
        source = _Messages(data, reading)
        return _ChatRenderer(data, reading, source, tokenizer, notes)
    if reading.kind == "text":
        return _TextRenderer(data, unused)
    prompts: PromptReader = AlpacaPrompts(chat=is_wrapped)
    if reading.kind == "prompt_completion":
        prompts = FieldPrompts(*reading.fields)
    if is_wrapped:
        source = _WrappedPrompts(prompts)
        return _ChatRenderer(data, reading, source, tokenizer, notes)
    return _PromptRenderer(prompts, unused)


class _TextRenderer:
    def __init__(self, data: DataConfig, unused: UnusedFields):
        self._text = Field(data.text)
        self._unused = unused

    def __call__(self, records: Sequence[Record]) -> list[Rendered | DataError]:
        self._unused.check_fields(records, [self._text])
        texts = self._text.read(records)
        return [t if isinstance(t, DataError) else PlainText(t) for t in texts]


class _PromptRenderer:
    def __init__(self, prompts: PromptReader, unused: UnusedFields):
        self._prompts = prompts
        self._unused = unused

    def __call__(self, records: Sequence[Record]) -> list[Rendered | DataError]:
        self._unused.check_fields(records, self._prompts.fields)
        return list(self._prompts.read(records))


@runtime_checkable
class _ConversationReader(Protocol):
    """Reads a conversation from each record, without tools and the setting `system`.

    Attributes:
        fields: The fields that it reads.
    """

    fields: list[Field]

    def read(self, records: Sequence[Record]) -> list[Conversation | DataError]:
        """Returns the conversation of each record, or its error."""
        ...


class _WrappedPrompts:
    """Makes a conversation of a prompt and its completion."""

    def __init__(self, prompts: PromptReader):
        self._prompts = prompts
        self.fields = prompts.fields

    def read(self, records: Sequence[Record]) -> list[Conversation | DataError]:
        """Returns the conversation of each record, or its error."""
        return [
            pair if isinstance(pair, DataError) else self._wrap(pair)
            for pair in self._prompts.read(records)
        ]

    def _wrap(self, pair: PromptCompletion) -> Conversation:
        return Conversation(
            [
                {"role": "user", "content": pair.prompt},
                {"role": "assistant", "content": pair.completion},
            ]
        )


class _Messages:
    """Reads conversations from one field, or from a prompt and its completion."""

    def __init__(self, data: DataConfig, reading: Reading):
        self._data = data
        self._reading = reading
        self._is_columnar = _is_columnar(data)
        self.fields = [Field(name) for name in reading.fields]

    def read(self, records: Sequence[Record]) -> list[Conversation | DataError]:
        """Returns the conversation of each record, or its error."""
        return list(map(self._read, records))

    def _read(self, record: Record) -> Conversation | DataError:
        parts = []
        try:
            for field in self._reading.fields:
                if field not in record:
                    return missing_field(field, record)
                part = read_messages(
                    record,
                    field,
                    is_columnar=self._is_columnar,
                    roles=self._data.roles,
                )
                parts.append(part)
            chat = parts[0]
            if self._reading.has_messages:
                learns_all = self._data.loss_on == "all"
                chat = join_prompt(*parts, is_prompt_trained=learns_all)
            is_last = self._data.loss_on == "last"
            return without_earlier_answers(chat) if is_last else chat
        except DataError as error:
            return error


class _ChatRenderer:
    """Renders conversations."""

    def __init__(
        self,
        data: DataConfig,
        reading: Reading,
        source: _ConversationReader,
        tokenizer: Tokenizer,
        notes: Notes,
    ):
        self._data = data
        self._source = source
        self._systems = SystemMessages(reading.system, data.system)
        self._chat = tokenizer.chat
        self._chat.check_kwargs()
        self._is_columnar = _is_columnar(data)
        self._has_tools = "tools" in self._chat.variables
        self._fields = [*source.fields, *self._systems.fields]
        if self._has_tools:
            self._fields.append(Field("tools"))
        # A template with {% generation %} itself says what is trained on.
        marks_targets = self._chat.mentions("endgeneration")
        self._trains_one_role = data.loss_on != "all" and not marks_targets
        self._unused_keys = [k for k in _SIGNIFICANT_KEYS if not self._chat.mentions(k)]
        self._notes, self._unused = notes, UnusedFields(notes)

    def __call__(self, records: Sequence[Record]) -> list[Rendered | DataError]:
        read = map(
            self._with_system, self._source.read(records), self._systems.read(records)
        )
        read = list(map(self._with_tools, read, records))
        good = [c for c in read if not isinstance(c, DataError)]
        self._unused.check_fields(records, self._fields)
        self._unused.check_messages(good, self._unused_keys)
        if self._trains_one_role:
            self._unused.check_roles(good)
        chats = iter(self._chat.render_all(good, self._data.loss_on))
        return [c if isinstance(c, DataError) else _checked(next(chats)) for c in read]

    def _with_system(
        self, conversation: Conversation | DataError, system: str | DataError
    ) -> Conversation | DataError:
        if isinstance(conversation, DataError) or not system:
            return conversation
        if isinstance(system, DataError):
            return system
        if any(m["role"] in SYSTEM_ROLES for m in conversation.messages):
            self._notes.count("chat", _OWN_SYSTEM)
            return conversation
        return with_system(conversation, system)

    def _with_tools(
        self, conversation: Conversation | DataError, record: Record
    ) -> Conversation | DataError:
        if isinstance(conversation, DataError) or not self._has_tools:
            return conversation
        try:
            tools = read_tools(
                record.get("tools"), "tools", is_columnar=self._is_columnar
            )
        except DataError as error:
            return error
        return dataclasses.replace(conversation, tools=tools)


def _is_columnar(data: DataConfig) -> bool:
    """Whether null stands for an absent key, as in files of columns."""
    return Path(data.path).suffix not in (".jsonl", ".json")


def _checked(chat: Chat | DataError) -> Chat | DataError:
    if isinstance(chat, DataError):
        return chat
    try:
        check_text(chat.text, "the rendered chat")
    except DataError as error:
        return error
    return chat

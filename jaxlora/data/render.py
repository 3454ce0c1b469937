"""Renders records as text, and marks the target characters."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from jaxlora.config import DataConfig
from jaxlora.data.chat import Chat
from jaxlora.data.fields import Field, UnusedFields, is_template, missing_field
from jaxlora.data.messages import (
    Conversation,
    check_text,
    read_messages,
    read_tools,
)
from jaxlora.data.notes import Notes
from jaxlora.data.read import Record
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.errors import DataError

Kind = Literal["prompt_completion", "messages", "text"]

_FIELDS: dict[Kind, tuple[str, ...]] = {
    "prompt_completion": ("prompt", "completion"),
    "messages": ("messages",),
    "text": ("text",),
}
# Keys that change the meaning of a message, if the chat template reads them.
_SIGNIFICANT_KEYS = (
    "tool_calls",
    "function_call",
    "reasoning_content",
    "thinking",
    "images",
    "train",
    "training",
    "train_on",
    "train_on_turn",
    "loss",
    "mask",
)


@dataclasses.dataclass(frozen=True, slots=True)
class PromptCompletion:
    """A prompt, and the completion that is trained on."""

    prompt: str
    completion: str


@dataclasses.dataclass(frozen=True, slots=True)
class PlainText:
    """A text that is trained on completely."""

    text: str


Rendered = PromptCompletion | Chat | PlainText
Renderer = Callable[[Sequence[Record]], "list[Rendered | DataError]"]


def make_renderer(
    data: DataConfig, first: Record, tokenizer: Tokenizer, notes: Notes
) -> Renderer:
    """Chooses how records become text.

    Args:
        data: The user's settings for the records.
        first: The first record; its fields decide the kind if `data.kind` is `auto`.
        tokenizer: Holds the chat template.
        notes: Gets a line for each field that the user probably meant but that is not
            used.

    Returns:
        A function from records to texts. For a record that cannot be used, it returns a
        DataError without the record's number, which the caller knows.

    Raises:
        DataError: The kind is ambiguous, or options contradict it.
        ModelError: The records are chats, and the tokenizer has no chat template.
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
    unused = UnusedFields(notes)
    if kind == "text":
        return _TextRenderer(data, unused)
    if kind == "messages" or data.chat:
        return _ChatRenderer(data, kind, tokenizer, unused)
    return _PromptCompletionRenderer(data, unused)


def has_kind(data: DataConfig, record: Record) -> bool:
    """Whether a record has the fields of at least one kind."""
    return bool(_kinds_that_fit(data, record))


def choose_kind(data: DataConfig, first: Record) -> Kind:
    """Returns the kind of the records: `data.kind`, or by the first record's fields.

    If several kinds fit, one whose field names the user set is preferred.

    Raises:
        DataError: No kind fits, or more than one.
    """
    if data.kind != "auto":
        return data.kind
    fits = _kinds_that_fit(data, first)
    defaults = DataConfig.model_fields
    renamed = [
        kind
        for kind in fits
        if any(getattr(data, k) != defaults[k].default for k in _FIELDS[kind])
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
        f"records have the fields {found}; expected {data.prompt!r} and "
        f"{data.completion!r}, or {data.messages!r}, or {data.text!r}. Name the fields "
        "in data.prompt and data.completion, data.messages or data.text."
    )


def _kinds_that_fit(data: DataConfig, record: Record) -> list[Kind]:
    return [
        kind
        for kind, keys in _FIELDS.items()
        if all(
            is_template(getattr(data, k)) or getattr(data, k) in record for k in keys
        )
    ]


class _TextRenderer:
    def __init__(self, data: DataConfig, unused: UnusedFields):
        self._text = Field(data.text)
        self._unused = unused

    def __call__(self, records: Sequence[Record]) -> list[Rendered | DataError]:
        self._unused.check_fields(records, [self._text])
        texts = self._text.read(records)
        return [t if isinstance(t, DataError) else PlainText(t) for t in texts]


class _PromptCompletionRenderer:
    def __init__(self, data: DataConfig, unused: UnusedFields):
        self._prompt, self._completion = Field(data.prompt), Field(data.completion)
        self._unused = unused

    def __call__(self, records: Sequence[Record]) -> list[Rendered | DataError]:
        self._unused.check_fields(records, self.fields)
        return list(self.pairs(records))

    @property
    def fields(self) -> list[Field]:
        """The fields that the renderer reads."""
        return [self._prompt, self._completion]

    def pairs(self, records: Sequence[Record]) -> list[PromptCompletion | DataError]:
        """The prompt and completion of each record."""
        prompts = self._prompt.read(records)
        completions = self._completion.read(records)
        return list(map(self._pair, prompts, completions))

    def _pair(self, prompt: str | DataError, completion: str | DataError):
        if isinstance(prompt, DataError):
            return prompt
        if isinstance(completion, DataError):
            return completion
        if not completion:
            return DataError(
                f"completion {self._completion.source!r} is empty, so there is nothing "
                "to learn. Remove the record."
            )
        return PromptCompletion(prompt, completion)


class _ChatRenderer:
    """Renders conversations, or prompts and completions as conversations."""

    def __init__(
        self,
        data: DataConfig,
        kind: Kind,
        tokenizer: Tokenizer,
        unused: UnusedFields,
    ):
        self._data = data
        self._chat = tokenizer.chat
        is_wrapped = kind == "prompt_completion"
        self._pairs = _PromptCompletionRenderer(data, unused) if is_wrapped else None
        self._is_columnar = Path(data.path).suffix not in (".jsonl", ".json")
        self._has_tools = "tools" in self._chat.variables
        self._fields = [Field("tools")] if self._has_tools else []
        self._fields += self._pairs.fields if self._pairs else [Field(data.messages)]
        self._unused_keys = [k for k in _SIGNIFICANT_KEYS if not self._chat.mentions(k)]
        self._unused = unused

    def __call__(self, records: Sequence[Record]) -> list[Rendered | DataError]:
        if self._pairs is None:
            read = list(map(self._read, records))
        else:
            read = list(map(self._wrap, self._pairs.pairs(records)))
        read = list(map(self._with_tools, read, records))
        good = [c for c in read if not isinstance(c, DataError)]
        self._unused.check_fields(records, self._fields)
        self._unused.check_messages(good, self._unused_keys)
        chats = iter(self._chat.render_all(good, self._data.loss_on))
        return [c if isinstance(c, DataError) else _checked(next(chats)) for c in read]

    def _read(self, record: Record) -> Conversation | DataError:
        try:
            if self._data.messages not in record:
                return missing_field(self._data.messages, record)
            conversation = read_messages(
                record, self._data.messages, is_columnar=self._is_columnar
            )
        except DataError as error:
            return error
        if not self._chat.mentions("tool_calls"):
            for i, message in enumerate(conversation.messages):
                if message.get("tool_calls") and not message["content"]:
                    return DataError(
                        f"{self._data.messages}[{i}] only calls tools, and the chat "
                        "template does not print tool_calls. Use a template that does, "
                        "or write the call into the content."
                    )
        return conversation

    def _wrap(self, pair: PromptCompletion | DataError) -> Conversation | DataError:
        if isinstance(pair, DataError):
            return pair
        system = self._data.system
        return Conversation(
            [
                *([] if system is None else [{"role": "system", "content": system}]),
                {"role": "user", "content": pair.prompt},
                {"role": "assistant", "content": pair.completion},
            ]
        )

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


def _checked(chat: Chat | DataError) -> Chat | DataError:
    if isinstance(chat, DataError):
        return chat
    try:
        check_text(chat.text, "the rendered chat")
    except DataError as error:
        return error
    return chat

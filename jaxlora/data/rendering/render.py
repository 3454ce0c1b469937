"""Turns records into texts, and marks what of them is trained on."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxlora.data.formats.example import NO_PROMPT, Example, Rendered
from jaxlora.data.formats.format import Reading, as_text, field, found, read_number
from jaxlora.data.records.files import Record
from jaxlora.data.records.messages import (
    SYSTEM_ROLES,
    Conversation,
    join_prompt,
    read_messages,
    with_system,
    without_earlier_answers,
)
from jaxlora.data.records.notes import Notes
from jaxlora.data.records.tool_calls import read_tools
from jaxlora.data.records.values import check_text, is_columnar
from jaxlora.data.rendering.fields import FieldTemplates, UnusedFields
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.errors import DataError

# An example, and the text or the error of each of its completions.
_Texts = tuple[Example, Sequence[Rendered | DataError]]

_OWN_SYSTEM = "the record's own system message is used, not that of data.system"


def attempt[T, U](step: Callable[[T], U], record: T | DataError) -> U | DataError:
    """Takes a step with a record, unless it has failed before.

    Steps raise their errors. Only here do they become results, beside those of others.
    """
    if isinstance(record, DataError):
        return record
    try:
        return step(record)
    except DataError as error:
        return error


def attempt_all[T, U](
    step: Callable[[list[T]], Iterable[U]], records: Sequence[T | DataError]
) -> Iterator[U | DataError]:
    """Takes a step with all records that have not failed before, at once."""
    made = iter(step([one for one in records if not isinstance(one, DataError)]))
    for one in records:
        yield one if isinstance(one, DataError) else next(made)


class Renderer:
    """Turns records into texts: one for each sample of a record.

    A record becomes an example by its format, and the example becomes texts, which are
    chats if it has messages or if they are asked for.
    """

    def __init__(self, reading: Reading, tokenizer: Tokenizer, notes: Notes):
        """Makes a renderer.

        Args:
            reading: How the records are read.
            tokenizer: Holds the chat template, which only chats need.
            notes: Gets a line for each field that the user probably meant but that is
                not used.

        Raises:
            DataError: Options contradict the kind.
            ModelError: The records are chats, and the tokenizer has no chat template.
        """
        data = reading.data
        _check_settings(reading)
        self._reading = dataclasses.replace(reading, vocab_size=tokenizer.vocab_size)
        self._data, self._notes = data, notes
        self._templates = FieldTemplates([*reading.fields, reading.system or ""])
        self._is_columnar = is_columnar(data.path)
        num = reading.format.num_samples
        self._prompt_name, self._names = reading.fields[0], reading.fields[-num:]
        self._chat = tokenizer.chat if data.chat or reading.has_messages else None
        self._has_tools = False
        if self._chat is not None:
            self._chat.check_kwargs()
            self._has_tools = "tools" in self._chat.variables
        used = [*reading.fields, reading.label, reading.system, data.weight]
        used.append("tools" if self._has_tools else None)
        self._unused = UnusedFields(notes, filter(None, used), self._chat, data.loss_on)

    def __call__(
        self, records: Sequence[Record | DataError]
    ) -> list[tuple[Rendered, ...] | DataError]:
        """Renders records.

        Args:
            records: The records, or the errors of those that cannot be read.

        Returns:
            For each record the texts of its samples, the chosen one of a preference
            first. For one that cannot be used, the error is without its number, which
            the caller knows.
        """
        if self._reading.format.gives != "distill":
            self._unused.check_fields(one for one in records if isinstance(one, dict))
        if self._templates.sources:
            rendered = attempt_all(self._templates.render, records)
            records = [attempt(self._templates.filled, one) for one in rendered]
        if self._chat is None:
            finish = lambda one: self._finished(self._texts(one))
            return [attempt(finish, one) for one in records]
        conversations = [attempt(self._conversations, one) for one in records]
        chats = attempt_all(self._chats, conversations)
        return [attempt(self._finished, one) for one in chats]

    def _example(self, record: Record) -> Example:
        """Makes an example of a record, with what the settings say of it."""
        data, example = self._data, self._reading.convert(record)
        if data.weight is not None:
            field(record, data.weight)
            weight = read_number(record, data.weight, "weight", above=0)
            example = dataclasses.replace(example, weight=weight)
        if data.system is None and self._reading.system is None:
            return example
        return dataclasses.replace(example, system=self._system(record))

    def _system(self, record: Record) -> str:
        """Returns the system message of a record by the setting, "" for none."""
        name = self._reading.system
        if name is None:
            return self._data.system or ""
        if name in record:
            return "" if record[name] is None else as_text(record[name], name)
        cure = f", or set it to {{{{ {name} | default('', true) }}}}"
        raise DataError(
            f"data.system is {name!r}, and there is no such field (fields found: "
            f"{found(record)}). Write the field, null for no system message"
            f"{cure if name.isidentifier() else ''}. A system message that is the same "
            "for all records has several words."
        )

    def _texts(self, record: Record) -> tuple[Example, list[Rendered]]:
        """Returns the texts of a record's completions before they become chats."""
        example = self._example(record)
        if example.tokens is not None:
            return example, [Rendered("", tokens=example.tokens)]
        prompt = None
        if example.prompt is not NO_PROMPT:
            prompt = as_text(example.prompt, self._prompt_name)
        texts = []
        for completion, name in zip(example.completions, self._names, strict=True):
            text = as_text(completion, name)
            if prompt is not None and not text:
                raise DataError(
                    f"completion {name!r} is empty, so there is nothing to learn. "
                    "Remove the record."
                )
            texts.append(Rendered(text, prompt=prompt))
        return example, texts

    def _conversations(self, record: Record) -> tuple[Example, list[Conversation]]:
        """Returns an example, and the conversation of each of its completions."""
        if self._reading.has_messages:
            example = self._example(record)
            pairs = zip(example.completions, self._names, strict=True)
            chats = [self._messages(example.prompt, *pair) for pair in pairs]
        else:
            example, texts = self._texts(record)
            chats = list(map(_wrapped, texts))
        if example.system:
            chats = [self._with_system(chat, example.system) for chat in chats]
        if self._has_tools:
            tools = read_tools(example.tools, "tools", is_columnar=self._is_columnar)
            chats = [dataclasses.replace(chat, tools=tools) for chat in chats]
        return example, chats

    def _messages(self, prompt: Any, completion: Any, name: str) -> Conversation:
        read = functools.partial(
            read_messages, is_columnar=self._is_columnar, roles=self._data.roles
        )
        if prompt is NO_PROMPT:
            chat = read(completion, name)
        else:
            before = read(prompt, self._prompt_name)
            # A prompt that is no field of its own is the start of the completion's.
            is_apart = len(self._reading.fields) > len(self._names)
            chat = join_prompt(
                before,
                read(completion, name, start=0 if is_apart else len(prompt)),
                is_prompt_trained=self._data.loss_on == "all",
            )
        is_last = self._data.loss_on == "last"
        return without_earlier_answers(chat) if is_last else chat

    def _with_system(self, chat: Conversation, system: str) -> Conversation:
        if any(message["role"] in SYSTEM_ROLES for message in chat.messages):
            self._notes.count("chat", _OWN_SYSTEM)
            return chat
        return with_system(chat, system)

    def _chats(
        self, examples: Sequence[tuple[Example, list[Conversation]]]
    ) -> list[_Texts]:
        """Renders the conversations of examples."""
        assert self._chat is not None
        conversations = [chat for _, chats in examples for chat in chats]
        self._unused.check_messages(conversations)
        rendered = iter(self._chat.render_all(conversations, self._data.loss_on))
        return [
            (example, [next(rendered) for _ in chats]) for example, chats in examples
        ]

    def _finished(self, made: _Texts) -> tuple[Rendered, ...]:
        """Returns the texts of an example, with the numbers that came with it."""
        example, texts = made[0], list(map(_checked, made[1]))
        if self._reading.format.gives in ("preference", "unpaired"):
            _check_preference(texts)
        value = float(example.margin or example.label or 0)
        if value or example.weight != 1:
            texts[0] = dataclasses.replace(texts[0], value=value, weight=example.weight)
        return tuple(texts)


def _check_settings(reading: Reading) -> None:
    """Checks that settings do not contradict how the records are read."""
    data, is_chat = reading.data, reading.has_messages
    is_text = reading.format.kind == "text"
    if data.weight is not None and reading.format.gives in ("preference", "unpaired"):
        raise DataError(
            f"weight={data.weight!r} weighs the losses of tokens, and the records are "
            f"read as {reading}. Remove data.weight."
        )
    if data.chat and (is_chat or is_text):
        raise DataError(
            "chat=true wraps prompt and completion, but the records are read as "
            f"{reading}. Remove data.chat, or set data.kind to prompt_completion."
        )
    for name, what in (
        ("system", f"system={data.system!r} is"),
        ("chat_template", "chat_template is"),
        ("chat_template_kwargs", "chat_template_kwargs are"),
    ):
        if getattr(data, name) in (None, {}) or is_chat or data.chat:
            continue
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


def _check_preference(texts: Sequence[Rendered]) -> None:
    if any(text.weights for text in texts):
        raise DataError(
            "a message has a weight that is neither 0 nor 1, which only objective "
            "next_token takes into account. Remove the weights."
        )
    if len(texts) == 2 and texts[0] == texts[1]:
        raise DataError(
            "both answers are the same text, so neither is better. Remove the record, "
            "or use a template that prints how they differ."
        )


def _wrapped(text: Rendered) -> Conversation:
    """Makes a conversation of a prompt and its completion."""
    if text.prompt is None:
        raise DataError(
            "chat=true wraps prompt and completion, and the record has no prompt. "
            "Remove data.chat."
        )
    asked = {"role": "user", "content": text.prompt}
    return Conversation([asked, {"role": "assistant", "content": text.text}], [1, 1])


def _checked(text: Rendered | DataError) -> Rendered:
    if isinstance(text, DataError):
        raise text
    if text.target_spans is not None:
        check_text(text.text, "the rendered chat")
    return text

"""Fields of records: reading them as text, and logging those that are not used."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxlora.data.records.messages import Conversation
from jaxlora.data.records.notes import Notes
from jaxlora.data.records.preference import describe_preference, find_number_label
from jaxlora.data.records.read import Record
from jaxlora.data.records.values import check_text
from jaxlora.data.templates.inner_values import find_text
from jaxlora.data.templates.template import Failure, run_task
from jaxlora.data.templates.template_task import Payload, Task
from jaxlora.errors import DataError

# Fields whose text is the system message in common formats.
_SYSTEM_FIELDS = ("system", "system_prompt", "system_message")
# Fields that change the meaning of a record in common formats.
_SIGNIFICANT_FIELDS = frozenset(
    (
        "tools",
        "functions",
        *_SYSTEM_FIELDS,
        "history",
        "weight",
        "images",
        "image",
        "videos",
        "video",
        "audios",
        "audio",
        "documents",
        "chat_template_kwargs",
    )
)


# How fields are used that are not.
_CURES = {
    name: f" Set data.system to {name} if it holds system messages of chats."
    for name in _SYSTEM_FIELDS
}

_LABEL_CURE = " Set the job's objective to kto if it says which answers are good."

# Roles that are as the user expects: `assistant` is trained on, the others are not.
_KNOWN_ROLES = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function")
)


def is_template(source: str) -> bool:
    """Whether `source` is a template over fields, not the name of a field."""
    return "{{" in source


def check_template(source: str) -> None:
    """Checks that a template over fields parses; names of fields always do.

    Raises:
        DataError: It does not.
    """
    if not is_template(source):
        return
    (answer,) = run_task(Task(source), [Payload("names")])
    if isinstance(answer, Failure):
        raise DataError(
            f"the template {source!r} does not parse ({answer.why}). Correct the "
            "template."
        )


def may_be_field(source: str) -> bool:
    """Whether a text could be the name of a field, as it is one word of ASCII."""
    return re.fullmatch(r"[\w.-]*\w", source, re.ASCII) is not None


class Field:
    """A field of the records, or a template over their fields."""

    def __init__(self, source: str):
        self.source = source

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Names of the fields that it reads; empty if a template does not parse."""
        if not is_template(self.source):
            return frozenset([self.source])
        (answer,) = run_task(Task(self.source), [Payload("names")])
        return frozenset([] if isinstance(answer, Failure) else answer["names"])

    def read(self, records: Sequence[Record]) -> list[str | DataError]:
        """Returns the text of each record, or its error."""
        if not is_template(self.source):
            return [self._read_field(record) for record in records]
        payloads = [
            Payload("text", {k: v for k, v in record.items() if k in self.names})
            for record in records
        ]
        answers = run_task(Task(self.source), payloads)
        return list(map(self._read_answer, records, answers))

    def _read_field(self, record: Record) -> str | DataError:
        if self.source not in record:
            return missing_field(self.source, record)
        return self._check(record[self.source])

    def _read_answer(self, record: Record, answer: Any) -> str | DataError:
        if not isinstance(answer, Failure):
            return self._check(answer["text"])
        if answer.kind == "limit":
            return DataError(
                f"the template {self.source!r} exceeds a limit: {answer.why}. Shorten "
                "the record or simplify the template."
            )
        where = "does not parse" if answer.kind == "syntax" else "failed"
        return DataError(
            f"the template {self.source!r} {where} ({answer.why}; fields "
            f"found: {_names(record)}). Correct the template."
        )

    def _check(self, text: Any) -> str | DataError:
        try:
            cure = _text_cure(self.source, text)
            return check_text(text, f"field {self.source!r}", cure=cure)
        except DataError as error:
            return error


def _text_cure(field: str, value: Any) -> str:
    """Says how a field that is not text becomes text."""
    expression: str | None = field
    if isinstance(value, Mapping | list | tuple):
        expression = find_text(field, value)
    elif value is None:
        expression = f"{field} or ''"
    elif isinstance(value, bool):
        expression = f"{field} | tojson"
    is_binary = isinstance(value, bytes)
    if expression is None or is_binary or not field.isidentifier():
        return "Store it as text."
    return f'Store it as text, or use a template: "{{{{ {expression} }}}}".'


class SystemMessages:
    """Reads the system message of each record.

    Attributes:
        fields: The fields that it reads.
    """

    def __init__(self, field: str | None, text: str | None):
        """Makes a reader.

        Args:
            field: Field of the system message, or a template over fields; None: all
                records have the same one.
            text: This system message, or None.
        """
        self.fields = [] if field is None else [Field(field)]
        self._text = text

    def read(self, records: Sequence[Record]) -> list[str | DataError]:
        """Returns the system message of each record, "" for none, or its error."""
        if not self.fields:
            return [self._text or ""] * len(records)
        (field,) = self.fields
        if is_template(field.source):
            return field.read(records)
        return [self._read(field, record) for record in records]

    def _read(self, field: Field, record: Record) -> str | DataError:
        name = field.source
        if name in record:
            return "" if record[name] is None else field.read([record])[0]
        cure = f", or set it to {{{{ {name} | default('', true) }}}}"
        return DataError(
            f"data.system is {name!r}, and there is no such field (fields found: "
            f"{_names(record)}). Write the field, null for no system message"
            f"{cure if name.isidentifier() else ''}. A system message that is the same "
            "for all records has several words."
        )


def missing_field(field: str, record: Record) -> DataError:
    """Makes the error for a record without a field."""
    preference = describe_preference(record)
    if preference is not None:
        return DataError(f"{preference} (Fields found: {_names(record)}.)")
    return DataError(
        f"field {field!r} is missing (fields found: {_names(record)}). Add it, or name "
        "another field in data."
    )


def _names(record: Record) -> str:
    return ", ".join(map(str, record)) or "none"


class UnusedFields:
    """Warns once about each field or role without effect that should have one."""

    def __init__(self, notes: Notes):
        self._notes = notes

    def check_fields(self, records: Iterable[Record], used: Sequence[Field]) -> None:
        """Warns about unused fields of records.

        Args:
            records: The records.
            used: The fields that are used.
        """
        names = frozenset[str]().union(*(field.names for field in used))
        candidates = _SIGNIFICANT_FIELDS - names
        for record in records:
            for name in candidates & record.keys():
                if record[name] not in (None, "", [], {}):
                    self._name(f"the field {name!r}", _CURES.get(name, ""))
            if (label := find_number_label(record)) and label not in names:
                self._name(f"the field {label!r}", _LABEL_CURE)

    def check_messages(
        self, conversations: Iterable[Conversation], keys: Sequence[str]
    ) -> None:
        """Warns about keys of messages that the template does not use.

        Args:
            conversations: The messages.
            keys: Keys that the template does not use.
        """
        for conversation in conversations:
            for message in conversation.messages:
                for key in keys:
                    if message.get(key) not in (None, "", [], {}):
                        self._name(f"the key {key!r} of messages")

    def check_roles(self, conversations: Iterable[Conversation]) -> None:
        """Warns about roles that are not trained on and may be the assistant's.

        Args:
            conversations: The messages.
        """
        for conversation in conversations:
            for message in conversation.messages:
                if message["role"] not in _KNOWN_ROLES:
                    self._notes.add_once(
                        f"messages with the role {message['role']!r:.80} are not "
                        "trained on. If they are the assistant's, set data.roles to "
                        f"{{{message['role']:.80}: assistant}}."
                    )

    def _name(self, what: str, cure: str = "") -> None:
        self._notes.add_once(
            f"{what} is not used, because neither the chat template nor the configured "
            f"fields refer to it.{cure}"
        )

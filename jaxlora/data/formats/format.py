"""The definition of a format of records, and functions that read fields of records."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxlora.config import DataConfig
from jaxlora.data.formats.example import Example
from jaxlora.data.records.files import Record
from jaxlora.data.records.preference import describe_preference
from jaxlora.data.records.values import check_text
from jaxlora.data.templates.inner_values import find_text
from jaxlora.errors import DataError

# An example has one completion, two, one with a label, or tokens of a teacher.
Gives = Literal["completion", "preference", "unpaired", "distill"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A form that records may have.

    Attributes:
        kind: Value of `data.kind`.
        fits: Whether a record has this form, with the user's settings.
        convert: Makes an example of a record, by the reading of all records.
        settings: The settings that name its fields. A user who sets one means a format
            that has it.
        decide: Decides by the first record what settings leave open. It gets a reading
            with the fields of `settings`, and returns how all records are read.
        gives: What its examples have. Anything but a completion is only read for
            objectives that learn from it, or if `data.kind` says so.
        is_built_in: Whether it is one of this package.
    """

    kind: str
    fits: Callable[[Record, DataConfig], bool]
    convert: Callable[[Record, "Reading"], Example]
    settings: tuple[str, ...] = ()
    decide: Callable[["Reading", Record], "Reading"] = lambda reading, _: reading
    gives: Gives = "completion"
    is_built_in: bool = True

    @property
    def num_samples(self) -> int:
        """Number of samples of a record, which are used together or not at all."""
        return 2 if self.gives == "preference" else 1

    def read(self, data: DataConfig, first: Record) -> "Reading":
        """Decides how all records are read.

        Raises:
            DataError: Settings contradict the format or the first record.
        """
        fields = [getattr(data, name) for name in self.settings]
        given = tuple(one for one in fields if one is not None)
        return self.decide(Reading(format=self, data=data, fields=given), first)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How the records of a data set are read, as the first one decides.

    Attributes:
        format: The format of the records.
        data: The settings, in which the first record has decided what they leave open.
        fields: Names of the fields, or templates over fields: that of the prompt first,
            those of the completions last.
        has_messages: Whether prompts and completions are lists of messages, not texts.
        label: Field of the label, if there is one.
        answer: How the other fields of a labelled record are read.
        system: Field of the system message, or a template; None: the setting `system`
            is the message of all records, or there is none.
        note: What else to say about the reading.
        vocab_size: Number of tokens of the tokenizer, for records of tokens.
    """

    format: Format
    data: DataConfig
    fields: tuple[str, ...]
    has_messages: bool = False
    label: str | None = None
    answer: "Reading | None" = None
    system: str | None = None
    note: str = ""
    vocab_size: int = 0

    def convert(self, record: Record) -> Example:
        """Makes an example of a record.

        Raises:
            DataError: A field is missing, or its value is of another form.
        """
        return self.format.convert(record, self)

    def __str__(self) -> str:
        given = [*self.fields, *([self.label] if self.label else [])]
        names = ", ".join("a template" if is_template(f) else f for f in given)
        if self.system is not None:
            system = "a template" if is_template(self.system) else self.system
            names += f"; system: {system}"
        is_split = (self.answer or self).format.kind != "messages"
        what = ": lists of messages" if self.has_messages and is_split else ""
        return f"{self.format.kind} ({names}{what}{self.note})"


def is_template(source: str) -> bool:
    """Whether `source` is a template over fields, not the name of a field."""
    return "{{" in source


def may_be_field(source: str) -> bool:
    """Whether a text could be the name of a field, as it is one word of ASCII."""
    return re.fullmatch(r"[\w.-]*\w", source, re.ASCII) is not None


def has(record: Record, *sources: str) -> bool:
    """Whether a record has all of these fields; a template over fields always is."""
    return all(is_template(source) or source in record for source in sources)


def found(record: Record) -> str:
    """Lists the fields of a record, for errors."""
    return ", ".join(map(str, _without_templates(record))) or "none"


def field(record: Record, name: str) -> Any:
    """Returns the value of a field.

    Raises:
        DataError: There is no such field.
    """
    if name in record:
        return record[name]
    if (preference := describe_preference(_without_templates(record))) is not None:
        raise DataError(f"{preference} (Fields found: {found(record)}.)")
    raise DataError(
        f"field {name!r} is missing (fields found: {found(record)}). Add it, or name "
        "another field in data."
    )


def _without_templates(record: Record) -> Record:
    """Returns a record without the texts of templates, which are named as they are."""
    return {name: one for name, one in record.items() if not is_template(str(name))}


def as_text(value: Any, name: str) -> str:
    """Returns the value of a field as text.

    Raises:
        DataError: It is no text; the error says how it becomes one.
    """
    if type(value) is str and value.isascii():
        return value
    return check_text(value, f"field {name!r}", cure=_text_cure(name, value))


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


def holds_messages(value: Any) -> bool:
    """Whether a field holds messages, and not a list of other values."""
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def read_number(
    record: Record, name: str, what: str, above: float = -math.inf
) -> float:
    """Returns the number in a field.

    Args:
        record: The record.
        name: The field.
        what: Names the number in errors.
        above: It must be greater than this, and finite.

    Raises:
        DataError: It is no such number.
    """
    number = record.get(name)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not above < number < math.inf:
        rule = "a number" if math.isinf(above) else f"a number above {above:g}"
        raise DataError(f"the {what} {name!r} is {number!r:.80}. Write {rule}.")
    return float(number)

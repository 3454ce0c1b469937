"""A conversation: {role, content} messages, or {from, value} messages of ShareGPT."""

import dataclasses

from jaxlora.config import DataConfig
from jaxlora.data.formats.example import Example
from jaxlora.data.formats.format import Format, Reading, field, has
from jaxlora.data.records.files import Record

# The name that ShareGPT gives to the messages.
SHAREGPT = "conversations"


def fits(record: Record, data: DataConfig) -> bool:
    """Whether a record has messages."""
    return has(record, data.messages)


def fits_sharegpt(record: Record, data: DataConfig) -> bool:
    """Whether a record has messages under ShareGPT's name, and no other is set."""
    return SHAREGPT in record and not data.changes("messages")


def convert(record: Record, reading: Reading) -> Example:
    """Makes an example of them."""
    (name,) = reading.fields
    return Example(completions=(field(record, name),), tools=record.get("tools"))


def decide(reading: Reading, first: Record) -> Reading:
    """Says that these are no texts."""
    return dataclasses.replace(reading, has_messages=True)


def decide_sharegpt(reading: Reading, first: Record) -> Reading:
    """Uses ShareGPT's name."""
    return dataclasses.replace(reading, fields=(SHAREGPT,), has_messages=True)


FORMAT = Format(
    kind="messages",
    fits=fits,
    convert=convert,
    settings=("messages",),
    decide=decide,
)
FORMAT_OF_SHAREGPT = dataclasses.replace(
    FORMAT, fits=fits_sharegpt, decide=decide_sharegpt
)

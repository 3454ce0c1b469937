"""A prompt and its completion: two texts, or two lists of messages."""

import dataclasses

from jaxlora.config import DataConfig
from jaxlora.data.formats.example import Example
from jaxlora.data.formats.format import (
    Format,
    Reading,
    field,
    has,
    holds_messages,
    is_template,
)
from jaxlora.data.records.files import Record
from jaxlora.errors import DataError

# Fields of the prompt, the completion and the system message of OpenOrca.
ORCA = ("question", "response", "system_prompt")


def fits(record: Record, data: DataConfig) -> bool:
    """Whether a record has a prompt and a completion."""
    return has(record, data.prompt, data.completion)


def fits_orca(record: Record, data: DataConfig) -> bool:
    """Whether a record has the fields of OpenOrca, and the user names no others."""
    is_named = data.changes("prompt") or data.changes("completion")
    return record.keys() >= set(ORCA) and not is_named


def convert(record: Record, reading: Reading) -> Example:
    """Makes an example of both."""
    prompt, completion = (field(record, name) for name in reading.fields)
    return Example(prompt, (completion,), tools=record.get("tools"))


def decide(reading: Reading, first: Record) -> Reading:
    """Tells lists of messages from texts."""
    lists, texts = [], []
    for name in reading.fields:
        is_list = not is_template(name) and holds_messages(first.get(name))
        (lists if is_list else texts).append(name)
    if lists and texts:
        raise DataError(
            f"field {lists[0]!r} is a list of messages, and {texts[0]!r} is not. Make "
            "both lists of messages, or both texts."
        )
    return dataclasses.replace(reading, has_messages=bool(lists))


def decide_orca(reading: Reading, first: Record) -> Reading:
    """Makes chats of OpenOrca's texts."""
    *fields, system = ORCA
    reading = decide(dataclasses.replace(reading, fields=tuple(fields)), first)
    data = reading.data
    if not reading.has_messages:
        data = data.replace(chat=True)
    return dataclasses.replace(reading, data=data, system=system, note="; as chats")


FORMAT = Format(
    kind="prompt_completion",
    fits=fits,
    convert=convert,
    settings=("prompt", "completion"),
    decide=decide,
)
FORMAT_OF_ORCA = dataclasses.replace(FORMAT, fits=fits_orca, decide=decide_orca)

"""A record of another format with a label, which says whether its answer is good."""

import dataclasses
from collections.abc import Callable

from jaxlora.config import DataConfig
from jaxlora.data.formats.example import NO_PROMPT, Example
from jaxlora.data.formats.format import Format, Reading, field, found
from jaxlora.data.records.files import Record
from jaxlora.data.records.preference import read_label
from jaxlora.errors import DataError

# LLaMA-Factory's name of a label.
_KTO_TAG = "kto_tag"


def find_label(record: Record, data: DataConfig) -> str | None:
    """Returns the field of a record that has its label; None if there is none."""
    names = [data.label] if data.changes("label") else [data.label, _KTO_TAG]
    return next((name for name in names if name in record), None)


def fits(record: Record, data: DataConfig) -> bool:
    """Whether a record has a label."""
    return find_label(record, data) is not None


def decide(
    reading: Reading, first: Record, choose: Callable[[DataConfig, Record], Reading]
) -> Reading:
    """Reads all records as others without the label.

    Args:
        reading: Has the settings.
        first: The first record.
        choose: Chooses the reading of records without a label.
    """
    data, label = reading.data, find_label(first, reading.data)
    if label is None:
        raise DataError(
            f"field {data.label!r} is missing (fields found: {found(first)}). Name the "
            "field that says whether the answer is a good one in data.label."
        )
    if data.loss_on != "completion":
        raise DataError(
            f"loss_on={data.loss_on} trains on prompts, which have no label. Remove "
            "data.loss_on."
        )
    plain = data.replace(kind="auto", label=DataConfig.model_fields["label"].default)
    answer = choose(plain, _without(first, label))
    if answer.format.kind == "text":
        raise DataError(
            f"the records are read as {answer}, without a prompt (fields found: "
            f"{found(first)}). Name the fields in data.prompt and data.completion."
        )
    return dataclasses.replace(
        answer, format=reading.format, label=label, answer=answer
    )


def convert(record: Record, reading: Reading) -> Example:
    """Makes an example of the other fields, with the label.

    The last message of a conversation is the labelled answer.
    """
    assert reading.label is not None and reading.answer is not None, "decided"
    label = field(record, reading.label)
    if (is_good := read_label(label)) is None:
        raise DataError(
            f"the label {reading.label!r} is {label!r:.80}. Write true (or 1) for a "
            "good answer and false (or 0) for a bad one."
        )
    example = reading.answer.convert(_without(record, reading.label))
    if example.prompt is not NO_PROMPT:
        return dataclasses.replace(example, label=is_good)
    (messages,) = example.completions
    if not isinstance(messages, list) or len(messages) < 2:
        raise DataError(
            f"field {reading.fields[0]!r} is {messages!r:.80}. Write a list of "
            "messages that ends with the labelled answer."
        )
    prompt, completions = messages[:-1], (messages[-1:],)
    return dataclasses.replace(
        example, prompt=prompt, completions=completions, label=is_good
    )


def _without(record: Record, label: str) -> Record:
    return {name: value for name, value in record.items() if name != label}


FORMAT = Format(
    kind="unpaired",
    fits=fits,
    convert=convert,
    settings=("label",),
    gives="unpaired",
)

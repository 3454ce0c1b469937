"""Formats of users."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from jaxlora.data.formats.example import Example
from jaxlora.data.formats.format import (
    Format,
    Gives,
    Reading,
    found,
    holds_messages,
)
from jaxlora.data.formats.table import FORMATS, kinds
from jaxlora.data.records.files import Record
from jaxlora.errors import ConfigError, DataError

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_GIVES: tuple[Gives, ...] = ("completion", "preference", "unpaired")


def register_format(
    name: str,
    convert: Callable[[dict[str, Any]], Example],
    *,
    fits: Callable[[dict[str, Any]], bool] = lambda record: True,
    gives: str = "completion",
) -> None:
    """Makes a function a format of records, which `data.kind` names.

    Its texts and messages are checked, rendered and encoded as those of any other
    format. Call this in each process that trains, before the run is made.

        def convert(record):
            question, *answers = record["turns"]
            return jaxlora.Example(question, (answers[-1],))

        jaxlora.register_format("turns", convert)
        data = jaxlora.DataConfig(path="turns.jsonl", kind="turns")

    Args:
        name: Value of the setting `kind`: lower-case letters, digits and `_`.
        convert: Makes an example of a record, and depends on nothing else. It may run
            in several threads. An error that it raises is one of the record, as
            `data.bad_records` treats it. All records of a data set have texts, or all
            have lists of messages, as the first one.
        fits: Whether a record has this form. With `bad_records: drop`, the first one
            that does decides how all are read.
        gives: What an example has: `completion`, one; `preference`, the chosen and the
            rejected one, for objectives of pairs; `unpaired`, one with a label, for
            `kto`.

    Raises:
        ConfigError: The name is taken or no name, or `gives` is another word. Nothing
            is registered then.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"format name {name!r} must be lower-case letters, digits and '_', and "
            "begin with a letter. Choose such a name."
        )
    if name in (taken := ["auto", *kinds()]):
        raise ConfigError(
            f"format name {name!r} is taken: there are {', '.join(taken)}. Choose "
            "another name; a format is registered once in a process."
        )
    given = next((one for one in _GIVES if one == gives), None)
    if given is None:
        raise ConfigError(
            f"format {name!r}: gives is {gives!r}, and must be one of "
            f"{', '.join(_GIVES)}. Choose one."
        )
    FORMATS.append(
        Format(
            kind=name,
            fits=lambda record, data: bool(fits(record)),
            convert=lambda record, reading: _converted(convert, record, reading),
            decide=_decide,
            gives=given,
            is_built_in=False,
        )
    )


def _decide(reading: Reading, first: Record) -> Reading:
    example = reading.format.convert(first, reading)
    answers = ("chosen", "rejected") if len(example.completions) == 2 else ("answer",)
    return dataclasses.replace(
        reading,
        fields=("prompt", *answers),
        has_messages=all(map(holds_messages, example.completions)),
    )


def _converted(
    convert: Callable[[Record], Example], record: Record, reading: Reading
) -> Example:
    """Makes an example of a record, and checks it."""
    form = reading.format
    try:
        example = convert(record)
    except Exception as error:
        raise DataError(
            f"format {form.kind!r} does not convert the record: "
            f"{type(error).__name__}: {error} (fields found: {found(record)}). Correct "
            "the record, or the function that was registered."
        ) from error
    if not isinstance(example, Example):
        rule = f"a jaxlora.Example, not {example!r:.80}"
    elif len(example.completions) != form.num_samples:
        rule = f"{form.num_samples} completions, not {len(example.completions)}"
    elif (form.gives == "unpaired") != isinstance(example.label, bool):
        which = "no label" if example.label is not None else "a label"
        rule = f"an example with {which}"
    elif not 0 < example.weight < math.inf:
        rule = f"a weight above 0, not {example.weight!r:.80}"
    else:
        return example
    raise DataError(
        f"format {form.kind!r} must make {rule} of a record. Correct the function that "
        "was registered."
    )

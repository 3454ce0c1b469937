"""Formats of users."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from jaxlora.data.formats.example import NO_PROMPT, Example
from jaxlora.data.formats.format import (
    Format,
    Gives,
    Reading,
    found,
    holds_messages,
)
from jaxlora.data.formats.table import FORMATS
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
    format. Call this in each process that trains, before the run is made. The kind
    `auto` never stands for such a format.

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
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"format name {name!r} must be lower-case letters, digits and '_', and "
            "begin with a letter. Choose such a name."
        )
    if name in (taken := dict.fromkeys(["auto", *(one.kind for one in FORMATS)])):
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
    for what, function in (("convert", convert), ("fits", fits)):
        if not callable(function):
            raise ConfigError(
                f"format {name!r}: {what} is {function!r:.80}, and must be a function "
                "of a record. Give one."
            )
    FORMATS.append(
        Format(
            kind=name,
            fits=lambda record, data: _fits(name, fits, record),
            convert=lambda record, reading: _converted(convert, record, reading),
            decide=_decide,
            gives=given,
            is_built_in=False,
        )
    )


def _fits(name: str, fits: Callable[[Record], bool], record: Record) -> bool:
    try:
        return bool(fits(record))
    except Exception as error:
        raise DataError(
            f"format {name!r}: fits fails for the record: {type(error).__name__}: "
            f"{error} (fields found: {found(record)}). Correct the function that was "
            "registered."
        ) from error


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
        wrong = f"{example!r:.80}, not a jaxlora.Example"
    elif (wrong := _wrong(example, reading)) is None:
        return example
    raise DataError(
        f"format {form.kind!r} makes {wrong}. Correct the function that was registered."
    )


def _wrong(example: Example, reading: Reading) -> str | None:
    """Says what of an example does not fit its format; None: all does."""
    num, gives = reading.format.num_samples, reading.format.gives
    completions, margin, weight = example.completions, example.margin, example.weight
    if not isinstance(completions, tuple) or len(completions) != num:
        return f"the completions {completions!r:.80}, not a tuple of {num} for {gives}"
    if isinstance(example.label, bool) != (gives == "unpaired"):
        return f"the label {example.label!r:.80}, and gives {gives}"
    if margin is not None and not (gives == "preference" and _is_number(margin)):
        return f"the margin {margin!r:.80}, which is a number, of preferences only"
    if not _is_number(weight) or weight <= 0:
        return f"the weight {weight!r:.80}, which must be above 0"
    if weight != 1 and gives != "completion":
        return f"the weight {weight:g}, which only completions have"
    is_chat = reading.data.chat or all(map(holds_messages, completions))
    if not isinstance(example.system, str) or (example.system and not is_chat):
        return f"the system message {example.system!r:.80}, which is a text for chats"
    if example.tools and not is_chat:
        return "tools, which only chats have; set data.chat, or make lists of messages"
    if gives != "completion" and example.prompt is NO_PROMPT:
        return f"no prompt, which is needed as gives is {gives}"
    if example.tokens is not None:
        return "tokens, and must make completions"
    return None


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)

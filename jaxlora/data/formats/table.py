"""The formats of records, and the choice of one for the records of a data set."""

import dataclasses
from collections.abc import Sequence

from jaxlora.config import DataConfig
from jaxlora.data.formats import (
    alpaca,
    distill,
    messages,
    preference,
    prompt_completion,
    text,
    unpaired,
)
from jaxlora.data.formats.format import (
    Format,
    Reading,
    found,
    is_template,
    may_be_field,
)
from jaxlora.data.formats.prompt_completion import ORCA
from jaxlora.data.records.files import Record
from jaxlora.data.records.preference import describe_preference
from jaxlora.errors import DataError


def _decide_unpaired(reading: Reading, first: Record) -> Reading:
    return unpaired.decide(reading, first, choose_reading)


FORMATS: list[Format] = [
    prompt_completion.FORMAT,
    messages.FORMAT,
    text.FORMAT,
    messages.FORMAT_OF_SHAREGPT,
    prompt_completion.FORMAT_OF_ORCA,
    alpaca.FORMAT,
    preference.FORMAT,
    dataclasses.replace(unpaired.FORMAT, decide=_decide_unpaired),
    distill.FORMAT,
]


def formats_of(kind: str) -> list[Format]:
    """Returns the formats that a value of `data.kind` stands for.

    Raises:
        DataError: There is no such kind.
    """
    if kind == "auto":
        return [f for f in FORMATS if f.gives == "completion" and f.is_built_in]
    if formats := [one for one in FORMATS if one.kind == kind]:
        return formats
    kinds = ", ".join(dict.fromkeys(one.kind for one in FORMATS))
    raise DataError(
        f"data.kind is {kind!r}, and there are auto, {kinds}. Set one of them. A "
        "format of your own is registered with jaxlora.register_format, in each "
        "process that trains."
    )


def format_of(kind: str) -> Format:
    """Returns the first format of a kind, which says what its examples have."""
    return formats_of(kind)[0]


def has_kind(data: DataConfig, record: Record) -> bool:
    """Whether a record can be read as the kind that is set, with the user's settings.

    Names of fields that the user sets for other formats count only between formats
    that `auto` chooses from.
    """
    return any(
        one.fits(record, data)
        and (one.gives != "completion" or not _settings_of_others(data, one))
        for one in formats_of(data.kind)
    )


def choose_reading(data: DataConfig, first: Record) -> Reading:
    """Chooses how records are read: by `data.kind`, or by the first record's fields.

    If several formats fit, one whose field names the user set is preferred.

    Raises:
        DataError: No format fits, or more than one, or the user named a field of
            another one, or the first record contradicts the settings, or it holds a
            preference and the user chose no kind.
    """
    candidates = formats_of(data.kind)
    fits = [one for one in candidates if one.fits(first, data)]
    renamed = [one for one in fits if any(map(data.changes, one.settings))]
    is_chosen = bool(renamed) or (data.kind != "auto" and bool(fits))
    is_open = candidates[0].gives == "completion" and not is_chosen
    if is_open and (preference := describe_preference(first)) is not None:
        raise DataError(f"{preference} (Fields found: {found(first)}.)")
    if data.kind != "auto" and not fits:
        fits = candidates[:1]
    choice = [one.read(data, first) for one in renamed or fits]
    for reading in choice:
        if reading.label is None:  # otherwise, that was done without it
            _check_settings(reading, first)
    if len(choice) > 1:
        raise _ambiguous(choice, first)
    if not choice:
        raise _no_format(data, first)
    (reading,) = choice
    if (system := data.system) is None:
        return reading
    # Anything else is the system message of all records.
    is_field = system in first or is_template(system) or may_be_field(system)
    return dataclasses.replace(reading, system=system if is_field else None)


def _check_settings(reading: Reading, first: Record) -> None:
    """Checks that the user named no field that would be ignored."""
    data = reading.data
    for other, key in _settings_of_others(data, reading.format):
        keys = " and ".join(f"data.{name}" for name in other.settings)
        raise DataError(
            f"data.{key} is {getattr(data, key)!r:.80}, but the records are read as "
            f"{reading} (fields found: {found(first)}), which does not use it. Remove "
            f"data.{key}; or set data.kind to {other.kind}, and {keys} to fields that "
            "the records have."
        )


def _settings_of_others(data: DataConfig, chosen: Format) -> list[tuple[Format, str]]:
    """Returns the field settings that the user changed and that a format ignores."""
    return [
        (other, key)
        for other in FORMATS
        for key in other.settings
        if key not in chosen.settings and data.changes(key)
    ]


def _ambiguous(choice: Sequence[Reading], first: Record) -> DataError:
    kinds = dict.fromkeys(reading.format.kind for reading in choice)
    key, values = "kind", list(kinds)
    if len(kinds) == 1:
        key, values = "messages", [reading.fields[0] for reading in choice]
    return DataError(
        f"records can be read as {' or as '.join(map(str, choice))} (fields found: "
        f"{found(first)}). Set data.{key} to the one that is meant: "
        f"{' or '.join(values)}."
    )


def _no_format(data: DataConfig, first: Record) -> DataError:
    return DataError(
        f"records have the fields {found(first)}; expected {data.prompt!r} and "
        f"{data.completion!r}, or {data.messages!r}, or {messages.SHAREGPT!r}, or "
        f"{data.text!r}, or {alpaca.FIELDS[0]!r} and {alpaca.FIELDS[2]!r}, or "
        f"{', '.join(map(repr, ORCA[:2]))} and {ORCA[2]!r}. Name the "
        "fields in data.prompt and data.completion, data.messages or data.text."
    )

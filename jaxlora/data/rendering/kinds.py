"""Decides which fields of the records are read, and as what."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlora.config import DataConfig
from jaxlora.config.data_config import RecordKind
from jaxlora.data.records.preference import describe_preference
from jaxlora.data.records.read import Record
from jaxlora.data.rendering.fields import is_template, may_be_field
from jaxlora.errors import DataError

# The settings that name the fields of each kind.
_SETTINGS: Mapping[RecordKind, tuple[str, ...]] = {
    "prompt_completion": ("prompt", "completion"),
    "messages": ("messages",),
    "text": ("text",),
    "alpaca": (),
    "preference": ("prompt", "chosen", "rejected", "margin"),
    "unpaired": ("label",),
    "distill": (),
}
# The fields of records for distillation, as Axolotl names them in what it prepares.
IDS, TOP_IDS, TOP_LOGPROBS = "input_ids", "target_token_ids", "target_logprobs"
# The name that ShareGPT gives to the messages.
_SHAREGPT = "conversations"
# LLaMA-Factory's name of a label.
_KTO_TAG = "kto_tag"
# Samples of a record: a chosen and a rejected completion.
SAMPLES_PER_RECORD: Mapping[str, int] = {"preference": 2}
# Kinds that only some objectives learn from.
SPECIAL_KINDS: frozenset[RecordKind] = frozenset(("preference", "unpaired", "distill"))
ALPACA = ("instruction", "input", "output")
# Fields of the prompt, the completion and the system message of OpenOrca.
_ORCA = ("question", "response", "system_prompt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """The fields of the records that are read, and their meaning.

    Attributes:
        kind: The kind of the records.
        fields: Names of the fields, or templates over fields, in the order of the
            settings that name them.
        has_messages: Whether prompts and completions are lists of messages, not texts.
        has_prompt: Whether the first of the fields of a preference is the prompt;
            otherwise both completions begin with it.
        system: Field of the system message, or a template; None: the setting `system`
            is the message of all records, or there is none.
        is_chat: Whether prompt and completion become a chat, whatever `chat` says.
        answer: How the answer of an unpaired record is read; its label is the last of
            the fields.
    """

    kind: RecordKind
    fields: tuple[str, ...]
    has_messages: bool = False
    has_prompt: bool = True
    system: str | None = None
    is_chat: bool = False
    answer: "Reading | None" = None

    def __str__(self) -> str:
        names = ", ".join("a template" if is_template(f) else f for f in self.fields)
        what = ": lists of messages" if self.has_messages else ""
        if self.kind == "preference" and not self.has_prompt:
            what += "; the prompt is what both begin with"
        if self.system is not None:
            is_field = not is_template(self.system)
            names += f"; system: {self.system if is_field else 'a template'}"
        if self.is_chat:
            what += "; as chats"
        return f"{self.kind} ({names}{what})"


def has_kind(data: DataConfig, record: Record) -> bool:
    """Whether a record can be read as at least one kind, with the user's settings."""
    if data.kind == "preference":
        return all(is_template(f) or f in record for f in (data.chosen, data.rejected))
    if data.kind == "unpaired":
        return find_label(data, record) is not None
    if data.kind == "distill":
        return {IDS, TOP_IDS, TOP_LOGPROBS} <= record.keys()
    readings = _readings_that_fit(data, record)
    return any(not _settings_of_other_kinds(data, r.kind) for r in readings)


def choose_reading(data: DataConfig, first: Record) -> Reading:
    """Chooses how records are read: by `data.kind`, or by the first record's fields.

    If several kinds fit, one whose field names the user set is preferred.

    Raises:
        DataError: No kind fits, or more than one, or the user named a field of another
            kind, or the prompt is a list of messages and the completion is not, or the
            record holds a preference and the user chose no kind.
    """
    reading = _reading(data, first)
    if (system := data.system) is None:
        return reading
    is_field = system in first or is_template(system) or may_be_field(system)
    return dataclasses.replace(reading, system=system if is_field else None)


def _reading(data: DataConfig, first: Record) -> Reading:
    if data.kind == "preference":
        return _preference(data, first)
    if data.kind == "unpaired":
        return _unpaired(data, first)
    if data.kind == "distill":
        reading = Reading(kind="distill", fields=(IDS, TOP_IDS, TOP_LOGPROBS))
        _check_settings(data, reading, ", ".join(map(str, first)) or "none")
        return reading
    fits = _readings_that_fit(data, first)
    if data.kind != "auto":
        fits = [r for r in fits if r.kind == data.kind]
    renamed = [
        r for r in fits if any(_is_changed(data, key) for key in _SETTINGS[r.kind])
    ]
    found = ", ".join(map(str, first)) or "none"
    is_chosen = bool(renamed) or (data.kind != "auto" and bool(fits))
    preference = None if is_chosen else describe_preference(first)
    if preference is not None:
        raise DataError(f"{preference} (Fields found: {found}.)")
    if data.kind != "auto" and not fits:
        fits = [_asked_reading(data)]
    choice = renamed or fits
    for reading in choice:
        _check_settings(data, reading, found)
    if len(choice) == 1:
        return _with_messages(choice[0], first)
    if choice:
        kinds = dict.fromkeys(r.kind for r in choice)
        key, values = "kind", list(kinds)
        if len(kinds) == 1:
            key, values = "messages", [r.fields[0] for r in choice]
        raise DataError(
            f"records can be read as {' or as '.join(map(str, choice))} (fields found: "
            f"{found}). Set data.{key} to the one that is meant: {' or '.join(values)}."
        )
    raise DataError(
        f"records have the fields {found}; expected {data.prompt!r} and "
        f"{data.completion!r}, or {data.messages!r}, or {_SHAREGPT!r}, or "
        f"{data.text!r}, or {ALPACA[0]!r} and {ALPACA[2]!r}, or "
        f"{', '.join(map(repr, _ORCA[:2]))} and {_ORCA[2]!r}. Name the fields in "
        "data.prompt and data.completion, data.messages or data.text."
    )


def _preference(data: DataConfig, first: Record) -> Reading:
    """Returns how pairs are read: with a prompt, or by what their answers begin with.

    An answer may be text, a list of messages, or one message, which follows a list.
    """
    reading = Reading(kind="preference", fields=(data.chosen, data.rejected))
    found = ", ".join(map(str, first)) or "none"
    _check_settings(data, reading, found)
    if data.loss_on == "all":
        raise DataError(
            f"loss_on={data.loss_on} trains on prompts, which a preference has in "
            "common. Remove data.loss_on."
        )
    for key in ("chosen", "rejected"):
        field = getattr(data, key)
        if not is_template(field) and field not in first:
            raise DataError(
                f"field {field!r} is missing (fields found: {found}). Name the field "
                f"of the {key} answer in data.{key}."
            )
    answer, field = first.get(data.chosen), data.prompt
    is_message = isinstance(answer, dict) and bool(answer.keys() & {"role", "from"})
    has_messages = is_message or _holds_messages(answer)
    if is_message and not _is_changed(data, "prompt"):
        # LLaMA-Factory has the conversation before an answer in these.
        others = (name for name in (_SHAREGPT, "messages") if name in first)
        field = field if field in first else next(others, field)
    is_given = is_template(field) or field in first
    if has_messages:
        # Some sets repeat the prompt as text beside whole conversations.
        is_given = isinstance(first.get(field), list)
    if not is_given and (is_message or _is_changed(data, "prompt")):
        what = "a list of messages" if has_messages else "text"
        raise DataError(
            f"the field of the prompt, {field!r}, is missing or not {what} as the "
            f"answers are (fields found: {found}). Name it in data.prompt."
        )
    if data.chat and not is_given:
        raise DataError(
            "chat=true wraps prompt and answers, but the records have no field "
            f"{field!r} (fields found: {found}). Name the prompt in data.prompt, or "
            "remove data.chat."
        )
    return dataclasses.replace(
        reading,
        fields=(field, *reading.fields) if is_given else reading.fields,
        has_messages=has_messages,
        has_prompt=is_given,
    )


def find_label(data: DataConfig, record: Record) -> str | None:
    """Returns the field of a record that has its label; None if there is none."""
    names = [data.label]
    if not _is_changed(data, "label"):
        names.append(_KTO_TAG)
    return next((name for name in names if name in record), None)


def _unpaired(data: DataConfig, first: Record) -> Reading:
    """Returns how labelled answers are read: as records without the label."""
    label, found = find_label(data, first), ", ".join(map(str, first)) or "none"
    if label is None:
        raise DataError(
            f"field {data.label!r} is missing (fields found: {found}). Name the field "
            "that says whether the answer is a good one in data.label."
        )
    if data.loss_on != "completion":
        raise DataError(
            f"loss_on={data.loss_on} trains on prompts, which have no label. Remove "
            "data.loss_on."
        )
    plain = data.replace(kind="auto", label=DataConfig.model_fields["label"].default)
    others = {name: value for name, value in first.items() if name != label}
    answer = choose_reading(plain, others)
    if answer.kind == "text":
        raise DataError(
            f"the records are read as {answer}, without a prompt (fields found: "
            f"{found}). Name the fields in data.prompt and data.completion."
        )
    fields = (*answer.fields, label)
    return dataclasses.replace(answer, kind="unpaired", fields=fields, answer=answer)


def _check_settings(data: DataConfig, reading: Reading, found: str) -> None:
    """Checks that the user named no field that would be ignored."""
    for kind, key in _settings_of_other_kinds(data, reading.kind):
        keys = " and ".join(f"data.{name}" for name in _SETTINGS[kind])
        raise DataError(
            f"data.{key} is {getattr(data, key)!r:.80}, but the records are read as "
            f"{reading} (fields found: {found}), which does not use it. Remove "
            f"data.{key}; or set data.kind to {kind}, and {keys} to fields that the "
            "records have."
        )


def _settings_of_other_kinds(
    data: DataConfig, kind: RecordKind
) -> list[tuple[RecordKind, str]]:
    """Returns the field settings that the user changed and that `kind` does not use."""
    return [
        (other, key)
        for other, keys in _SETTINGS.items()
        for key in keys
        if key not in _SETTINGS[kind] and _is_changed(data, key)
    ]


def _asked_reading(data: DataConfig) -> Reading:
    """Returns the reading that `data.kind` asks for, whatever the records have."""
    assert data.kind != "auto"
    fields = tuple(getattr(data, key) for key in _SETTINGS[data.kind])
    return Reading(kind=data.kind, fields=fields or ALPACA)


def _readings_that_fit(data: DataConfig, record: Record) -> list[Reading]:
    readings = []
    for kind, keys in _SETTINGS.items():
        if kind in SPECIAL_KINDS:  # only on request: their fields fit other kinds, too
            continue
        fields = tuple(getattr(data, key) for key in keys)
        if fields and all(is_template(f) or f in record for f in fields):
            readings.append(Reading(kind=kind, fields=fields))
    if _SHAREGPT in record and not _is_changed(data, "messages"):
        readings.append(Reading(kind="messages", fields=(_SHAREGPT,)))
    is_named = _is_changed(data, "prompt") or _is_changed(data, "completion")
    if record.keys() >= set(_ORCA) and not is_named:
        *fields, system = _ORCA
        reading = Reading(kind="prompt_completion", fields=tuple(fields))
        readings.append(dataclasses.replace(reading, system=system, is_chat=True))
    if ALPACA[0] in record and ALPACA[2] in record:
        fields = tuple(name for name in ALPACA if name in record)
        readings.append(Reading(kind="alpaca", fields=fields))
    return readings


def _with_messages(reading: Reading, first: Record) -> Reading:
    """Tells prompts and completions that are lists of messages from texts."""
    if reading.kind != "prompt_completion":
        return reading
    lists, texts = [], []
    for field in reading.fields:
        is_list = not is_template(field) and _holds_messages(first.get(field))
        (lists if is_list else texts).append(field)
    if lists and texts:
        raise DataError(
            f"field {lists[0]!r} is a list of messages, and {texts[0]!r} is not. Make "
            "both lists of messages, or both texts."
        )
    return dataclasses.replace(reading, has_messages=bool(lists))


def _holds_messages(value: Any) -> bool:
    """Whether a field holds messages, and not a list of other values."""
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _is_changed(data: DataConfig, key: str) -> bool:
    """Whether the user gave a setting another value than its default."""
    return getattr(data, key) != DataConfig.model_fields[key].default

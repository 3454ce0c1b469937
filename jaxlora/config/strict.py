"""The base class of configurations, which is frozen and strict about keys and types.

All problems of a configuration, and of those in it, are reported together. A number
cannot be given as true or as "8", and a boolean must be true or false.
"""

import dataclasses
import difflib
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, get_args, get_origin

import numpy as np
import pydantic
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jaxlora.config.aliases import find_hint
from jaxlora.problems import (
    MAPPING,
    UNKNOWN,
    Problem,
    Source,
    problems_of,
    settings_error,
    validation_error,
)

# Settings that break a rule, and for each one the rule with the cure.
Wrong = dict[str, str]
# Adds the settings of a configuration that break some rules.
Rules = Callable[[Any, Wrong], None]

# Linux has no longer names and paths, in bytes.
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
_ROOM = 400  # for what a run writes into its folder

# Upper bound of all counts, which must not overflow 64-bit integers.
_LARGEST_INT = 2**53


def check_number(value: Any) -> Any:
    """Refuses true and texts as numbers, such as "8"."""
    if isinstance(value, bool | np.bool_ | str | bytes):
        raise PydanticCustomError("number", "expected a number")
    return value


def _as_tuple(value: Any) -> Any:
    is_one = isinstance(value, int | float | str) and not isinstance(value, bool)
    return (value,) if is_one else value


def _check_path(path: str) -> str:
    longest = max(path.split("/"), key=_num_bytes)
    _check_length("name", longest, _LONGEST_NAME)
    return _check_length("path", path, _LONGEST_PATH)


def _check_output(path: str) -> str:
    _check_path(path)
    _check_length("path", os.path.abspath(path), _LONGEST_PATH - _ROOM)
    return path


def _check_length(kind: str, text: str, most: int) -> str:
    if (count := _num_bytes(text)) > most:
        raise ValueError(
            f"the {kind} {text[:30]!r}... has {count} bytes, and can have at most "
            f"{most}. Choose a shorter one"
        )
    return text


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


# This validator must come after the constraints of a number.
Number = BeforeValidator(check_number)

Texts = str | tuple[str, ...]
InputPath = Annotated[str, AfterValidator(_check_path)]
OutputPath = Annotated[str, AfterValidator(_check_output)]
Bool = pydantic.StrictBool
Int = Annotated[int, Field(ge=-_LARGEST_INT, le=_LARGEST_INT), Number]
PositiveInt = Annotated[int, Field(gt=0, le=_LARGEST_INT), Number]
NonNegativeInt = Annotated[int, Field(ge=0, le=_LARGEST_INT), Number]
# Bounds one axis, or one kind of replicas or groups. More are a slip of the keyboard.
MOST_DEVICES = 65_536
Devices = Annotated[int, Field(gt=0, le=MOST_DEVICES), Number]
# Bounds a job, whose steps the device counts in 32 bits.
MOST_STEPS = 10**9
Steps = Annotated[int, Field(gt=0, le=MOST_STEPS), Number]
# Bounds a microbatch. More are a slip of the keyboard, and take minutes to compile.
MOST_TOKENS = 2**20
Tokens = Annotated[int, Field(gt=0, le=MOST_TOKENS), Number]
OneOrMore = BeforeValidator(_as_tuple)
AtLeastOne = Field(min_length=1)
Indices = Annotated[tuple[NonNegativeInt, ...], OneOrMore]
PositiveFloat = Annotated[float, Field(gt=0.0), Number]
NonNegativeFloat = Annotated[float, Field(ge=0.0), Number]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0), Number]
Share = Annotated[float, Field(gt=0.0, le=1.0), Number]


class StrictModel(pydantic.BaseModel):
    """A frozen configuration, whose problems are reported together.

    Attributes:
        aliases: Our names of settings that mean the same in other tools.
        hints: What to write instead of other settings of theirs.
        belongs: For settings of other configurations, whose they are and where they go.
        rules: Rules between several settings, in groups. Where a setting is invalid,
            what a group says after it reads that setting is left out.
    """

    aliases: ClassVar[Mapping[str, str]] = {}
    hints: ClassVar[Mapping[str, str]] = {}
    belongs: ClassVar[Mapping[str, str]] = {}
    rules: ClassVar[tuple[Rules, ...]] = ()

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )

    def __init__(self, /, **settings: Any):
        """Checks the settings.

        Raises:
            ConfigError: Settings break rules; the message lists them all.
        """
        try:
            super().__init__(**settings)
        except pydantic.ValidationError as found:
            source = Source(type(self).__name__)
            raise settings_error(problems_of(found), source) from None

    # Without this mark, pydantic would also call it for configurations in others.
    __init__.__pydantic_base_init__ = True  # pyrefly: ignore[missing-attribute]

    def replace[T: pydantic.BaseModel](self: T, **changes: Any) -> T:
        """Returns a copy with other values, which are checked.

        Settings that were left out still count as left out.

        Raises:
            ConfigError: Values break rules; the message lists them all.
        """
        # beartype does not know the type `Self`.
        kind: Any = type(self)
        new = {kind.aliases.get(key, key) for key in changes}
        given = {n: getattr(self, n) for n in self.model_fields_set if n not in new}
        return kind(**given | changes)

    def changes(self, setting: str) -> bool:
        """Whether a setting has another value than its default."""
        return getattr(self, setting) != type(self).model_fields[setting].default

    @classmethod
    def known(cls, values: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
        """Finds the settings among keys, which may be names of other tools.

        Returns:
            The setting that each known key gives, and for each other key the reason
            why it cannot be used.
        """
        ours: dict[str, str] = {}
        refused: dict[str, str] = {}
        first: dict[str, str] = {}
        for key, value in values.items():
            name = cls.aliases.get(key, key)
            if name not in cls.model_fields:
                refused[key] = cls._why_not(key, value)
            elif name in first:
                refused[key] = (
                    f"{first[name]!r} and {key!r} are two names of {name!r}. Keep one."
                )
            else:
                ours[key], first[name] = name, key
        return ours, refused

    @classmethod
    def _why_not(cls, key: Any, value: Any) -> str:
        """Returns why a key that names no setting cannot be used."""
        if (hint := find_hint(cls.hints, key, value)) is not None:
            return f"{key!r} is not a setting here. {hint}"
        if (place := cls.belongs.get(key)) is not None:
            return f"{key!r} is a setting of {place}."
        return unknown_key(str(key), list(cls.model_fields))

    @classmethod
    def part(cls, name: str) -> type["StrictModel"] | None:
        """Returns the class of the configurations that a setting holds, if it does."""
        return _part(cls.model_fields[name].annotation)

    @classmethod
    def key_of(cls, setting: int | str, values: Any) -> str | None:
        """Returns the key by which a mapping has a setting, which may be an alias."""
        same = cls.aliases
        name = same.get(str(setting), setting)
        keys = values if isinstance(values, dict) else ()
        return next((key for key in keys if same.get(key, key) == name), None)

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _report_together(cls, values: Any, check: Any) -> Any:
        if isinstance(values, cls):
            return check(values)
        if not isinstance(values, dict):
            example = next(name for name in [*_required(cls), *cls.model_fields])
            raise PydanticCustomError(MAPPING, "{example}", {"example": example})
        ours, refused = cls.known(values)
        problems = unknown(values, refused)
        spoilt = [key for key in ours if not _is_text(values[key])]
        problems += [Problem(path=(key,), text=_NO_TEXT) for key in spoilt]
        given = {name: values[k] for k, name in ours.items() if k not in spoilt}
        # Settings that are given, but with a misspelt key or a text that is none.
        hidden = {closest(str(key), cls.model_fields) for key in refused}
        hidden |= {ours[key] for key in spoilt}
        made = None
        try:
            made = check(given)
        except pydantic.ValidationError as error:
            problems += [
                problem
                for problem in problems_of(error, given)
                if problem.kind != "missing" or problem.path[0] not in hidden
            ]
        seen = made
        if problems:
            seen = _valid_part(cls, given, hidden | {p.path[0] for p in problems})
        for setting, text in _find_wrong(cls.rules, seen, is_whole=seen is made):
            value = given.get(setting, ())
            problems.append(Problem(path=(setting,), text=text, given=value))
        if not problems:
            return made
        keys: dict[Any, str] = {name: key for key, name in ours.items()}
        for number, problem in enumerate(problems):
            first, *rest = problem.path
            path = keys.get(first, first), *rest
            problems[number] = dataclasses.replace(problem, path=path)
        raise validation_error(cls.__name__, problems)


def unknown(
    values: Mapping[str, Any], refused: Mapping[str, str], *path: str
) -> list[Problem]:
    """Returns a problem for each key of settings at a path that is refused."""
    return [
        Problem(path=(*path, key), kind=UNKNOWN, text=text, given=values[key])
        for key, text in refused.items()
    ]


def _valid_part(kind: type[StrictModel], given: Mapping[str, Any], bad: set) -> Any:
    """Returns the valid settings; reading another one raises AttributeError."""
    valid = {name: value for name, value in given.items() if name not in bad}
    part = _with_optional_settings(kind).model_validate(valid)
    for name in bad.union(_required(kind)) - valid.keys():
        part.__dict__.pop(name, None)
    return part


@functools.cache
def _with_optional_settings(kind: type[StrictModel]) -> type[StrictModel]:
    """Returns a class of which no setting is required, and that has no rules."""
    optional: dict[str, Any] = {
        name: (kind.model_fields[name].annotation, Field(None, validate_default=False))
        for name in _required(kind)
    }
    part = pydantic.create_model(kind.__name__, __base__=kind, **optional)
    part.rules = ()
    return part


def _find_wrong(
    rules: Iterable[Rules], settings: Any, *, is_whole: bool
) -> Iterator[tuple[str, str]]:
    for group in rules:
        wrong: Wrong = {}
        try:
            group(settings, wrong)
        except AttributeError:  # the group reads a setting that is not valid
            if is_whole:
                raise
        yield from wrong.items()


def _required(kind: type[pydantic.BaseModel]) -> list[str]:
    return [name for name, field in kind.model_fields.items() if field.is_required()]


_NO_TEXT = "holds a NUL or half of a surrogate pair. Remove that character."


def _is_text(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_text, value))
    if not isinstance(value, str):
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _part(annotation: Any) -> type[StrictModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return annotation
    return next(filter(None, map(_part, get_args(annotation))), None)


def types_of(annotation: Any) -> set[Any]:
    """Returns the types in an annotation, without their parameters."""
    origin = get_origin(annotation)
    if origin in (tuple, list, dict):
        return {origin}
    if hasattr(annotation, "__metadata__"):
        return types_of(get_args(annotation)[0])
    if arguments := get_args(annotation):
        return set().union(*map(types_of, arguments))
    return {annotation}


def unknown_key(key: str, known: Collection[str]) -> str:
    """Returns an error message for an unknown key, which suggests the closest key."""
    near = closest(key, known)
    hint = f"Known keys: {', '.join(known)}." if known else "There are none."
    if near:
        hint = f"Did you mean {near!r}?"
    return f"unknown key {key!r:.100}. {hint}"


def closest(key: str, known: Collection[str]) -> str | None:
    """Returns the known key that one resembles; None if it resembles none."""
    return _closest(key[:100], tuple(known))


@functools.lru_cache(1000)  # many jobs may have the same mistake
def _closest(key: str, known: tuple[str, ...]) -> str | None:
    near = difflib.get_close_matches(key, known, n=1)
    return near[0] if near else None

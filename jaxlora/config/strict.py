"""The base class of configurations, which is frozen and strict about keys and types.

All problems of a configuration, and of those in it, are reported together. A number
cannot be given as true or as "8", and a boolean must be true or false.
"""

import difflib
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import pydantic
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jaxlora.config.aliases import OtherNames
from jaxlora.problems import (
    MAPPING,
    RULE,
    UNKNOWN,
    Path,
    Problem,
    PythonWords,
    problems_of,
    settings_error,
    validation_error,
)

# Returns the setting that breaks the rule, and the rule with the cure; None if none.
Rule = Callable[[Any], tuple[str, str] | None]

# Linux has no longer names and paths, in bytes.
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
_ROOM = 400  # for what a run writes into its folder

# Upper bound of all counts, which must not overflow 64-bit integers.
_LARGEST_INT = 2**53


def _check_number(value: Any) -> Any:
    if isinstance(value, bool | np.bool_ | str | bytes):
        raise PydanticCustomError("number", "expected a number")
    return value


def _check_bool(value: Any) -> Any:
    if not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "expected true or false")
    return value


def _check_texts(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise PydanticCustomError("texts", "expected text, or a list of texts")
    for item in value:
        if not isinstance(item, str):
            raise ValueError(f"{item!r:.80} in the list is not text: put it in quotes")
    return value


def _as_tuple(value: Any) -> Any:
    is_one = isinstance(value, int | float | str) and not isinstance(value, bool)
    return (value,) if is_one else value


def _check_path(path: str) -> str:
    longest = max(path.split("/"), key=_num_bytes)
    if (count := _num_bytes(longest)) > _LONGEST_NAME:
        raise ValueError(
            f"the name {longest[:30]!r}... has {count} bytes, and a file or folder can "
            f"have a name of at most {_LONGEST_NAME}. Choose a shorter one"
        )
    return _check_length(path, _LONGEST_PATH)


def _check_output(path: str) -> str:
    _check_path(path)
    _check_length(os.path.abspath(path), _LONGEST_PATH - _ROOM)
    return path


def _check_length(path: str, most: int) -> str:
    if (count := _num_bytes(path)) > most:
        raise ValueError(
            f"the path {path[:30]!r}... has {count} bytes, and can have at most "
            f"{most}. Choose a shorter one"
        )
    return path


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


# This validator must come after the constraints of a number.
Number = BeforeValidator(_check_number)

Texts = Annotated[str | tuple[str, ...], BeforeValidator(_check_texts)]
InputPath = Annotated[str, AfterValidator(_check_path)]
OutputPath = Annotated[str, AfterValidator(_check_output)]
Bool = Annotated[bool, BeforeValidator(_check_bool)]
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
Indices = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_as_tuple)]
PositiveFloat = Annotated[float, Field(gt=0.0), Number]
NonNegativeFloat = Annotated[float, Field(ge=0.0), Number]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0), Number]


class StrictModel(pydantic.BaseModel):
    """A frozen configuration, whose problems are reported together.

    Attributes:
        aliases: Names that other tools have for the settings.
        belongs: For settings of other configurations, whose they are and where they go.
        rules: Rules between several settings.
        nested: Configurations in the settings that the rules look into.
        is_part: Whether it holds the valid ones of settings that are not all valid.
    """

    aliases: ClassVar[OtherNames] = OtherNames(same={}, hints={})
    belongs: ClassVar[Mapping[str, str]] = {}
    rules: ClassVar[tuple[Rule, ...]] = ()
    nested: ClassVar[Mapping[str, type["StrictModel"]]] = {}
    is_part: ClassVar[bool] = False

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
            words = PythonWords(type(self).__name__)
            raise settings_error(problems_of(found), words) from None

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
        new = {kind.aliases.same.get(key, key) for key in changes}
        given = {n: getattr(self, n) for n in self.model_fields_set if n not in new}
        return kind(**given | changes)

    @classmethod
    def known(cls, values: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
        """Finds the settings among keys, which may be names of other tools.

        Returns:
            The setting that each known key gives, and for each other key the reason
            why it cannot be used.
        """
        ours, refused = cls.aliases.translate(values, cls.model_fields)
        for key in [key for key, name in ours.items() if name not in cls.model_fields]:
            del ours[key]
            place = cls.belongs.get(key)
            refused[key] = (
                f"{key!r} is a setting of {place}."
                if place
                else unknown_key(str(key), list(cls.model_fields))
            )
        return ours, refused

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _report_together(cls, values: Any, check: Any) -> Any:
        if isinstance(values, cls):
            return check(values)
        if not isinstance(values, dict):
            example = next(name for name in [*_required(cls), *cls.model_fields])
            raise PydanticCustomError(MAPPING, "{example}", {"example": example})
        ours, refused = cls.known(values)
        problems = [_problem(k, UNKNOWN, why, values[k]) for k, why in refused.items()]
        spoilt = [key for key in ours if not _is_text(values[key])]
        problems += [_problem(key, RULE, _NO_TEXT, values[key]) for key in spoilt]
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
                for problem in problems_of(error, cls)
                if problem.kind != "missing" or problem.path[0] not in hidden
            ]
        seen = made
        if problems:
            bad: list[Path] = [problem.path for problem in problems]
            bad += [(name,) for name in hidden if name is not None]
            seen = _Partial(cls, given, bad)
        problems += _broken(cls.rules, seen, given)
        if not problems:
            return made
        keys = {name: key for key, name in ours.items()}
        raise validation_error(
            cls.__name__, [problem.renamed(keys) for problem in problems]
        )


class _UnknownError(Exception):
    """A rule reads a setting that has no valid value."""


@functools.cache
def _part_of(kind: type[StrictModel]) -> type[StrictModel]:
    """Returns a class that takes a part of the settings of one, and has no rules."""
    optional: dict[str, Any] = {
        name: (kind.model_fields[name].annotation, Field(None, validate_default=False))
        for name in _required(kind)
    }
    part = pydantic.create_model(kind.__name__, __base__=kind, **optional)
    part.rules, part.is_part = (), True
    return part


class _Partial:
    """Settings, some of which are invalid.

    A rule that reads one of these is skipped: reading it raises `_UnknownError`. The
    others have their checked values, so a rule never meets a value of a wrong type.
    """

    def __init__(
        self, kind: type[StrictModel], given: Mapping[str, Any], bad: Sequence[Path]
    ):
        self._kind, self._given = kind, given
        self._bad = _by_first(bad)
        valid = {name: v for name, v in given.items() if name not in self._bad}
        self._valid = _part_of(kind).model_validate(valid)
        self._parts: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        field = self._kind.model_fields.get(name)
        if field is None:  # a property or a method
            return getattr(self._kind, name).__get__(self)
        if name not in self._bad:
            if field.is_required() and name not in self._given:
                raise _UnknownError(name)
            return getattr(self._valid, name)
        if name not in self._parts:
            self._parts[name] = self._looked_into(name, self._bad[name])
        return self._parts[name]

    def _looked_into(self, name: str, bad: Sequence[Path]) -> Any:
        """Returns a setting of which some parts are invalid, and others are not."""
        value = self._given.get(name)
        if name not in self._kind.nested or () in bad:
            raise _UnknownError(name)
        if not isinstance(value, list | tuple):
            return self._part(name, value, bad)
        inner = _by_first(bad)
        return [self._part(name, v, inner.get(i, [])) for i, v in enumerate(value)]

    def _part(self, name: str, value: Any, bad: Sequence[Path]) -> Any:
        kind = self._kind.nested[name]
        if isinstance(value, kind) and not bad:
            return value
        if () in bad or not isinstance(value, dict):
            raise _UnknownError(name)
        ours, refused = kind.known(value)
        # Paths have the keys that the user gave.
        paths = [(ours.get(str(path[0]), path[0]), *path[1:]) for path in bad]
        hidden = [closest(str(key), kind.model_fields) for key in refused]
        given = {setting: value[key] for key, setting in ours.items()}
        return _Partial(kind, given, [*paths, *((name,) for name in hidden if name)])


def _by_first(paths: Sequence[Path]) -> dict[int | str, list[Path]]:
    """Returns what follows the first part of each path, by that part."""
    found: dict[int | str, list[Path]] = {}
    for path in paths:
        found.setdefault(path[0] if path else "", []).append(path[1:])
    return found


def _broken(
    rules: Sequence[Rule], settings: Any, given: Mapping[str, Any]
) -> list[Problem]:
    problems = []
    for rule in rules:
        try:
            broken = rule(settings)
        except _UnknownError:
            continue
        if broken is not None:
            setting, text = broken
            problems.append(_problem(setting, RULE, text, given.get(setting, ())))
    return problems


def _problem(key: str, kind: str, text: str, given: Any) -> Problem:
    return Problem(path=(key,), kind=kind, text=text, given=given)


def _required(kind: type[pydantic.BaseModel]) -> list[str]:
    return [name for name, field in kind.model_fields.items() if field.is_required()]


_NO_TEXT = "holds a NUL or half of a surrogate pair. Remove that character."


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def unknown_key(key: str, known: Collection[str]) -> str:
    """Returns an error message for an unknown key, which suggests the closest key."""
    near = closest(key, known)
    hint = f"Did you mean {near!r}?" if near else f"Known keys: {', '.join(known)}."
    return f"unknown key {key!r:.100}. {hint}"


def closest(key: str, known: Collection[str]) -> str | None:
    """Returns the known key that one resembles; None if it resembles none."""
    return _closest(key[:100], tuple(known))


@functools.lru_cache(1000)  # many jobs may have the same mistake
def _closest(key: str, known: tuple[str, ...]) -> str | None:
    near = difflib.get_close_matches(key, known, n=1)
    return near[0] if near else None

"""The base class of configurations, which is frozen and strict about keys and types.

A number cannot be given as true or as "8", and a boolean must be true or false.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
import pydantic
from pydantic import BeforeValidator, Field

from jaxlora.other_names import OtherNames

# Upper bound of all counts, which must not overflow 64-bit integers.
_LARGEST_INT = 2**53


def _check_number(value: Any) -> Any:
    if isinstance(value, bool | np.bool_ | str | bytes):
        raise ValueError("expected a number, without quotes, such as 8 or 2e-4")
    return value


def _check_bool(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


# This validator must come after the constraints of a number.
Number = BeforeValidator(_check_number)

Bool = Annotated[bool, BeforeValidator(_check_bool)]
Int = Annotated[int, Field(ge=-_LARGEST_INT, le=_LARGEST_INT), Number]
PositiveInt = Annotated[int, Field(gt=0, le=_LARGEST_INT), Number]
NonNegativeInt = Annotated[int, Field(ge=0, le=_LARGEST_INT), Number]
PositiveFloat = Annotated[float, Field(gt=0.0), Number]
NonNegativeFloat = Annotated[float, Field(ge=0.0), Number]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0), Number]


class StrictModel(pydantic.BaseModel):
    """A frozen configuration. The error for an unknown key suggests the closest key.

    Attributes:
        other_names: Names that other tools have for the settings.
        belongs: For settings of other configurations, whose they are and where they go.
    """

    other_names: ClassVar[OtherNames] = OtherNames(same={}, hints={})
    belongs: ClassVar[Mapping[str, str]] = {}

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )

    def replace[T: pydantic.BaseModel](self: T, **changes: Any) -> T:
        """Returns a copy with other values, which are checked.

        Settings that were left out still count as left out.

        Raises:
            pydantic.ValidationError: A value breaks a rule.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        # beartype does not know the type `Self`.
        kind: Any = type(self)
        return kind(**given | kind.translate(changes))

    @classmethod
    def translate(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values by the names of the fields, from names of other tools too.

        Raises:
            ValueError: A key is unknown, or a setting is given by two names.
        """
        values = cls.other_names.translate(values)
        for key in values:
            if key not in cls.model_fields:
                if place := cls.belongs.get(key):
                    raise ValueError(f"{key!r} is a setting of {place}.")
                raise ValueError(unknown_key(str(key), list(cls.model_fields)))
        return values

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = cls.translate(values)
        for key, value in values.items():
            if isinstance(value, str) and not _is_text(value):
                raise ValueError(
                    f"{key} is {value!r:.80}, which holds a NUL or half of a surrogate "
                    "pair. Remove that character."
                )
        return values


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def unknown_key(key: str, known: list[str]) -> str:
    """Returns an error message for an unknown key, which suggests the closest key."""
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(known)}."
    return f"unknown key {key!r:.100}. {hint}"


def format_errors(error: pydantic.ValidationError, where: str) -> str:
    """Formats one line per error: the key, the reason, and the given value."""
    lines = []
    for item in error.errors(include_url=False):
        parts = map(str, item["loc"])
        path = ".".join(part for part in parts if not part.startswith("function-"))
        text = item["msg"].removeprefix("Value error, ")
        given = item["input"]
        if item["type"] == "string_type":
            text += ", in quotes if need be"
        shown = "" if isinstance(given, dict | list) else f" (given: {_shown(given)})"
        lines.append(f"{where}: {path + ': ' if path else ''}{text}{shown}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.100}"
    except ValueError:  # an integer with more digits than Python prints
        return "a number with thousands of digits"

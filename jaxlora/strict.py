"""The base class of configurations: frozen, and strict about keys and types.

Neither true nor "8" is accepted as a number, and only true and false as a truth value.
"""

import difflib
from typing import Annotated, Any

import numpy as np
import pydantic
from pydantic import BeforeValidator, Field

# Upper bound on all counts, which must not overflow the 64 bits of an array's element.
_LARGEST_INT = 2**53


def _check_number(value: Any) -> Any:
    if isinstance(value, bool | np.bool_ | str | bytes):
        raise ValueError("wanted a number, without quotes, such as 8 or 2e-4")
    return value


def _check_bool(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("wanted true or false")
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
    """A frozen configuration; the error for an unknown key names the nearest key."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _name_nearest_key(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for key, value in values.items():
            if key not in cls.model_fields:
                raise ValueError(unknown_key(str(key), list(cls.model_fields)))
            if isinstance(value, str) and not _is_text(value):
                raise ValueError(
                    f"{key} is {value!r:.80}, which holds a NUL or half of a surrogate "
                    "pair and so is no text. Remove that character."
                )
        return values


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def unknown_key(key: str, known: list[str]) -> str:
    """Says that `key` is unknown, and which known key was probably meant."""
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(known)}."
    return f"unknown key {key!r:.100}. {hint}"


def format_errors(error: pydantic.ValidationError, where: str) -> str:
    """Formats one line per mistake: its path, the reason, and the value given."""
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

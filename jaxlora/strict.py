"""The base class of configurations, which is frozen and strict about keys and types.

A number cannot be given as true or as "8", and a boolean must be true or false.
"""

import difflib
import re
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


def _check_texts(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise ValueError("expected text, or a list of texts, such as [q_proj, v_proj]")
    for item in value:
        if not isinstance(item, str):
            raise ValueError(f"{item!r:.80} in the list is not text: put it in quotes")
    return value


# This validator must come after the constraints of a number.
Number = BeforeValidator(_check_number)

Texts = Annotated[str | tuple[str, ...], BeforeValidator(_check_texts)]
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
        if isinstance(values, cls):
            return values
        if not isinstance(values, dict):
            fields = cls.model_fields
            needed = [name for name in fields if fields[name].is_required()]
            example = [*needed, *fields][0]
            raise ValueError(f"expected a mapping, such as {{{example}: ...}}")
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
        given = item["input"]
        text = _expected(item["type"], given)
        text = text or _in_our_words(item["msg"])
        shown = "" if isinstance(given, dict | list) else f" (given: {_shown(given)})"
        lines.append(f"{where}: {path + ': ' if path else ''}{text}{shown}")
    return "\n".join(lines)


def _expected(error_type: str, given: Any) -> str | None:
    """Describes what a value of the wrong type should have been.

    Args:
        error_type: Pydantic's name of the error.
        given: The value.

    Returns:
        The description; None for errors that are not about types.
    """
    if error_type == "string_type":
        if isinstance(given, list | tuple):
            return "expected one text, not a list"
        return "expected text, in quotes if need be"
    a_list = "expected a list: in brackets, or with '- ' before each item"
    return {
        "missing": "this key is required",
        "tuple_type": a_list,
        "list_type": a_list,
        "model_type": "expected a mapping",
        "dict_type": "expected a mapping, such as {name: value}",
        "int_type": "expected a whole number, such as 8",
        "int_from_float": "expected a whole number, such as 8",
        "float_type": "expected a number, such as 8 or 2e-4",
        "bool_type": "expected true or false",
    }.get(error_type)


def _in_our_words(message: str) -> str:
    """Returns a message of pydantic's as the other errors of this project sound."""
    message = message.removeprefix("Value error, ")
    return re.sub("^Input should be", "must be", message)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    try:
        return f"{value!r:.100}"
    except ValueError:  # an integer with more digits than Python prints
        return "a number with thousands of digits"

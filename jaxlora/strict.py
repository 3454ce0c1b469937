"""The base of every configuration: frozen, and strict about unknown keys."""

import difflib
from typing import Any

import pydantic


class Strict(pydantic.BaseModel):
    """A frozen configuration; an unknown key is an error that names the nearest."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _name_nearest_key(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for key in values:
            if key not in cls.model_fields:
                raise ValueError(unknown_key(str(key), list(cls.model_fields)))
        return values


def unknown_key(key: str, known: list[str]) -> str:
    """Says that `key` is unknown, and which known key was probably meant."""
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(known)}."
    return f"unknown key {key!r}. {hint}"


def explain(error: pydantic.ValidationError, where: str) -> str:
    """One line per mistake: its path, what is wrong, and the value that was given."""
    lines = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"])
        text = item["msg"].removeprefix("Value error, ")
        given = item["input"]
        shown = "" if isinstance(given, dict | list) else f" (given: {_short(given)})"
        lines.append(f"{where}: {path + ': ' if path else ''}{text}{shown}")
    return "\n".join(lines)


def _short(value: object) -> str:
    """A value as in Python, cut to a line or two: it may be all of a damaged file."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

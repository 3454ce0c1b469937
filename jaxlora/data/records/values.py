"""Checks values of records, and removes nulls from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlora.errors import DataError


def is_columnar(path: str | Path) -> bool:
    """Whether null stands for an absent key in a data set, as in files of columns."""
    return Path(path).suffix not in (".jsonl", ".json")


def without_nulls(value: Any) -> Any:
    """Returns `value` without the keys whose value is null, at any depth.

    Columnar files fill absent keys with null, but templates test if a key exists.
    """
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def check_text(text: Any, what: str, *, cure: str = "Store it as text.") -> str:
    """Returns `text` if it is a string that UTF-8 can encode.

    Args:
        text: The value.
        what: Describes the value in errors.
        cure: What to do if it is not a string.

    Raises:
        DataError: The value is not a string, or cannot be encoded.
    """
    if not isinstance(text, str):
        raise DataError(
            f"{what} is {text!r:.80}, of type {type(text).__name__}, not a string. "
            f"{cure}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} holds half of a surrogate pair at character {error.start}, which "
            "UTF-8 cannot encode. Remove it."
        ) from error
    return text

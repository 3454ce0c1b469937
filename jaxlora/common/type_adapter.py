"""Pydantic's adapters, which check and convert values; one is made for each type."""

import functools
from typing import Any

import pydantic


@functools.cache
def type_adapter(kind: Any) -> pydantic.TypeAdapter:
    """Returns pydantic's adapter of a type; to make that of a saved run takes 20 ms."""
    return pydantic.TypeAdapter(kind)

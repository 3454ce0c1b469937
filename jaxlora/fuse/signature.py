"""Finds parts that can be computed by the same equations."""

import dataclasses
from collections.abc import Hashable
from typing import Any

import numpy as np
from jax.extend import core

from jaxlora.fuse.regions.part import Part
from jaxlora.fuse.regions.row_expression import RowExpression
from jaxlora.fuse.site import Index

_PLACE = ("path", "location", "jaxpr", "equations", "sizes", "products")


def signature(part: Part) -> Hashable:
    """Describes a part without its place, its variables and the names of its indices.

    Calls of parts with equal signatures differ only in their variables, such as those
    of the layers of a decoder.
    """
    places = {v: i for i, v in enumerate(part.inputs)}
    sizes = part.site.sizes
    names: dict[Index, int] = {}

    def describe(value: Any, *, is_index: bool = False) -> Hashable:
        if isinstance(value, tuple):
            return tuple(describe(part, is_index=True) for part in value)
        if isinstance(value, core.Var):
            return places.get(value), value.aval
        if isinstance(value, RowExpression):
            return value
        if isinstance(value, core.Literal):
            return np.asarray(value.val).tobytes(), value.aval
        if dataclasses.is_dataclass(value):
            fields = (f.name for f in dataclasses.fields(value))
            return (
                type(value).__name__,
                *(describe(getattr(value, f)) for f in fields if f not in _PLACE),
            )
        if is_index and type(value) is int:  # all tuples of int hold indices
            return names.setdefault(value, len(names)), sizes[value]
        return value

    return describe(part)

"""The values of a setting in a sweep: the points of a grid, and random draws."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlora.config.sweep_config import Space
from jaxlora.problems import Path

_DIGITS = 3  # significant ones, of values from a range


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A setting that is varied.

    Attributes:
        name: Our name, such as `rank` or `data.limit`; `_` for several settings.
        path: Path in the run file.
        space: The values.
        is_integer: Whether the setting is a whole number.
    """

    name: str
    path: Path
    space: Space
    is_integer: bool


def grid(axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    """Yields all combinations of the axes' values, by name; the last varies fastest."""
    points = [_grid_values(axis) for axis in axes]
    for values in itertools.product(*points):
        yield dict(zip((axis.name for axis in axes), values, strict=True))


def _grid_values(axis: Axis) -> list[Any]:
    """Returns all values of an axis, in order and without repetition."""
    space = axis.space
    if space.values is not None:
        return list(space.values)
    assert space.min is not None and space.max is not None
    if space.num is None and space.q is None:
        return list(range(math.ceil(space.min), math.floor(space.max) + 1))
    if space.num is None:
        assert space.q is not None
        # A quotient such as 0.3 / 0.1 is not exact.
        first = math.ceil(round(space.min / space.q, 9))
        last = math.floor(round(space.max / space.q, 9))
        found = [_tidy(i * space.q, axis, 12) for i in range(first, last + 1)]
    else:
        shares = [i / max(1, space.num - 1) for i in range(space.num)]
        found = [_at(share, axis) for share in shares]
    return list(dict.fromkeys(found))


def draw(axis: Axis, seed: int, number: int) -> float:
    """Returns a random place on an axis; it depends on nothing but the arguments.

    Returns:
        The index of a value; of a range, the share of it, from 0 to 1.
    """
    space, u = axis.space, random.Random(f"{seed}/{number}/{axis.name}").random()
    if space.values is None:
        return u
    chances = space.probabilities or [1 / len(space.values)] * len(space.values)
    for index, reached in enumerate(itertools.accumulate(chances)):
        if u < reached:
            return index
    return len(space.values) - 1


def value_at(axis: Axis, place: float) -> Any:
    """Returns the value at a place on an axis, as `draw` returns it."""
    values = axis.space.values
    return _at(place, axis) if values is None else values[int(place)]


def _at(share: float, axis: Axis) -> int | float:
    """Returns the value at a share of a range, from 0 to 1."""
    space = axis.space
    assert space.min is not None and space.max is not None
    low, high = space.min, space.max
    is_integer = axis.is_integer or space.distribution == "int_uniform"
    if is_integer and not space.is_log and space.q is None and space.num is None:
        return min(math.floor(high), math.ceil(low) + int(share * (high - low + 1)))
    if space.is_log:
        value = math.exp(math.log(low) + share * math.log(high / low))
    else:
        value = low + share * (high - low)
    if space.q is not None:
        value = _tidy(round(value / space.q) * space.q, axis, 12)
    elif 0 < share < 1:
        value = _tidy(value, axis, _DIGITS)
    else:
        value = low if share == 0 else high
    return min(high, max(low, round(value) if is_integer else value))


def _tidy(value: float, axis: Axis, digits: int) -> int | float:
    """Rounds a value to significant digits, as names and files show it."""
    if axis.is_integer:
        return round(value)
    return float(f"{value:.{digits}g}")

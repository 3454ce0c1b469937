"""The space of a sweep: values of each setting, points of a grid, and random draws."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic

from jaxlora.config.aliases import OtherNames
from jaxlora.config.strict import (
    Number,
    PositiveFloat,
    PositiveInt,
    StrictModel,
)
from jaxlora.problems import Path

Distribution = Literal[
    "constant",
    "categorical",
    "uniform",
    "int_uniform",
    "q_uniform",
    "log_uniform_values",
    "q_log_uniform_values",
]
_Bound = Annotated[int | float, Number]
_EXPONENTS = (
    "In W&B, the bounds of log_uniform are exponents of e. Write "
    "`distribution: log_uniform_values`, whose min and max are values."
)
_DIGITS = 3  # significant ones, of values from a range


def _has_one_form(space: Any) -> tuple[str, str] | None:
    if space.values is not None:
        for name in ("min", "max", "q", "num"):
            if getattr(space, name) is not None:
                return name, (
                    f"{name} is of a range, and values is a list. Leave one of them "
                    "out."
                )
        if not space.values:
            return "values", "values is empty. Give at least one."
        if space.distribution not in (None, "constant", "categorical"):
            return "distribution", (
                f"{space.distribution} is of a range with min and max, and values is "
                "a list. Leave distribution out."
            )
    elif space.min is None or space.max is None:
        missing = "min" if space.min is None else "max"
        return missing, (
            f"{missing} is missing: give a list of values, or a range with min and max."
        )
    return None


def _range_is_one(space: Any) -> tuple[str, str] | None:
    if space.min is None or space.max is None:
        return None
    if not space.min < space.max:
        return "max", f"max is {space.max}, which is not above min={space.min}."
    if space.is_log and space.min <= 0:
        return "min", f"min is {space.min}, and a logarithmic range is above 0."
    if str(space.distribution).startswith("q_") and space.q is None:
        return "q", f"{space.distribution} rounds to multiples of q: give q."
    if space.distribution in ("constant", "categorical"):
        return "distribution", (
            f"{space.distribution} is of a list of values, and min and max are a "
            "range. Leave distribution out."
        )
    q = space.q
    if q is not None and math.floor(space.max / q) < math.ceil(space.min / q):
        return "q", f"there is no multiple of q={space.q} from min to max."
    return None


def _probabilities_fit(space: Any) -> tuple[str, str] | None:
    given = space.probabilities
    if given is None:
        return None
    if space.values is None or len(given) != len(space.values):
        return "probabilities", "give one probability for each of the values."
    if min(given) < 0 or abs(sum(given) - 1) > 1e-6:
        return "probabilities", f"they must add up to 1; they add up to {sum(given):g}."
    return None


class Space(StrictModel):
    """The values that one setting may take.

    Attributes:
        values: The values.
        probabilities: Probability of each of the values; None: all are the same.
        min: Lower bound of a range.
        max: Upper bound of a range, which is included.
        distribution: In the words of W&B. None: `categorical` for values; for a range,
            `int_uniform` if the setting is a whole number, else `uniform`.
        q: Values of a range are rounded to multiples of this.
        num: Number of points of a range in a grid, evenly spaced, by ratio if the range
            is logarithmic.
        times: Another setting, by which the value is multiplied.
        when: Other settings and the values (or lists of values) that they must have.
            Otherwise the setting keeps the job's own value.
    """

    rules = (_has_one_form, _range_is_one, _probabilities_fit)
    aliases = OtherNames(
        same={},
        hints={
            "mu": "Give a range with min and max, and distribution: uniform or "
            "log_uniform_values.",
            "sigma": "Give a range with min and max.",
            "parameters": "Write a setting within another one with a dot, such as "
            "data.limit.",
        },
    )

    values: tuple[Any, ...] | None = None
    probabilities: tuple[Annotated[float, Number], ...] | None = None
    min: _Bound | None = None
    max: _Bound | None = None
    distribution: Distribution | None = None
    q: PositiveFloat | None = None
    num: PositiveInt | None = None
    times: str | None = None
    when: dict[str, Any] = {}

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _values_may_stand_alone(cls, given: Any, check: Any) -> Any:
        if isinstance(given, list | tuple):
            given = {"values": given}
        elif isinstance(given, dict) and "value" in given and "values" not in given:
            given = {"values": [given["value"]]} | given
            del given["value"]
        elif not isinstance(given, dict | Space):
            given = {"values": [given]}
        return check(given)

    @pydantic.field_validator("distribution", mode="before")
    @classmethod
    def _bounds_are_values(cls, name: object) -> object:
        if name in ("log_uniform", "q_log_uniform", "inv_log_uniform"):
            raise ValueError(_EXPONENTS)
        return name

    @property
    def is_log(self) -> bool:
        """Whether the range is logarithmic."""
        return "log" in (self.distribution or "")

    @property
    def is_finite(self) -> bool:
        """Whether a grid can have all the values."""
        has_points = (self.values, self.num, self.q) != (None, None, None)
        return has_points or self.distribution == "int_uniform"


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


def is_place(places: Mapping[str, float], axes: Sequence[Axis]) -> bool:
    """Whether there is a place on each of the axes, by name, as `draw` returns it."""
    if places.keys() != {axis.name for axis in axes}:
        return False
    sizes = {a.name: len(a.space.values) for a in axes if a.space.values is not None}
    return all(
        0 <= place < sizes[name] and place == int(place)
        if name in sizes
        else 0 <= place <= 1
        for name, place in places.items()
    )


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

"""The space of a sweep: values of each setting, points of a grid, and random draws."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from jaxlora.config.strict import (
    AtLeastOne,
    Number,
    PositiveFloat,
    PositiveInt,
    StrictModel,
    Wrong,
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


def _check_bound(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("float_type", "expected a number")
    if abs(value) > _LARGEST:
        raise ValueError(
            f"the bounds of a range must be from -{_LARGEST:g} to {_LARGEST:g}."
        )
    return value


_Bound = Annotated[int | float, BeforeValidator(_check_bound)]
_EXPONENTS = (
    "In W&B, the bounds of log_uniform are exponents of e. Write "
    "`distribution: log_uniform_values`, whose min and max are values."
)
_DIGITS = 3  # significant ones, of values from a range
_LARGEST = 1e300  # of a bound; the difference of two bounds is a number, too
_MOST_STEPS = 2.0**53  # of q within a range, which differ as floats


def _form(space: Any, wrong: Wrong) -> None:
    is_list = space.values is not None
    for name in () if is_list else ("min", "max"):
        if getattr(space, name) is None:
            wrong[name] = (
                f"{name} is missing: give a list of values, or a range with min and "
                "max."
            )
    for name in ("min", "max", "q", "num") if is_list else ():
        if getattr(space, name) is not None:
            wrong[name] = (
                f"{name} is of a range, and values is a list. Leave one of them out."
            )
    if not is_list and not wrong:
        _range(space, wrong)
    if is_list and space.distribution not in (None, "constant", "categorical"):
        wrong["distribution"] = (
            f"{space.distribution} is of a range with min and max, and values is a "
            "list. Leave distribution out."
        )


def _range(space: Any, wrong: Wrong) -> None:
    low, high, q = space.min, space.max, space.q
    if not low < high:
        wrong["max"] = f"max is {high}, which is not above min={low}."
    elif space.is_log and low <= 0:
        wrong["min"] = f"min is {low}, and a logarithmic range is above 0."
    elif str(space.distribution).startswith("q_") and q is None:
        wrong["q"] = f"{space.distribution} rounds to multiples of q: give q."
    elif space.distribution in ("constant", "categorical"):
        wrong["distribution"] = (
            f"{space.distribution} is of a list of values, and min and max are a "
            "range. Leave distribution out."
        )
    elif q is not None and max(abs(low), abs(high)) / q > _MOST_STEPS:
        wrong["q"] = f"q={q} is too small to tell its multiples up to max apart."
    elif q is not None and not _multiples(low, high, q):
        wrong["q"] = f"there is no multiple of q={q} from min to max."


def _probabilities(space: Any, wrong: Wrong) -> None:
    given = space.probabilities
    if given is None or not (given or space.values):
        return
    if space.values is None or len(given) != len(space.values):
        wrong["probabilities"] = "give one probability for each of the values."
    elif min(given) < 0 or abs(sum(given) - 1) > 1e-6:
        wrong["probabilities"] = (
            f"they must add up to 1; they add up to {sum(given):g}."
        )


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

    rules = (_form, _probabilities)
    hints = {
        "mu": "Give a range with min and max, and distribution: uniform or "
        "log_uniform_values.",
        "sigma": "Give a range with min and max.",
        "parameters": "Write a setting within another one with a dot, such as "
        "data.limit.",
    }

    values: Annotated[tuple[Any, ...], AtLeastOne] | None = None
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


def _multiples(low: float, high: float, q: float) -> range:
    """Returns the whole numbers whose products with q are in a range."""
    first, last = low / q, high / q
    # A quotient such as 0.3 / 0.1 is not exact.
    is_near = lambda x: abs(x - round(x)) <= 1e-9 * abs(x)
    return range(
        round(first) if is_near(first) else math.ceil(first),
        (round(last) if is_near(last) else math.floor(last)) + 1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A setting that is varied.

    Attributes:
        name: Our name, such as `rank` or `data.limit`; `_` for several settings.
        path: Path in the run file.
        space: The values.
        is_integer: Whether the setting is a whole number.
        order: Its place in an order in which each axis comes behind those of the
            settings that it is multiplied by, or has conditions on.
    """

    name: str
    path: Path
    space: Space
    is_integer: bool
    order: int = 0

    @property
    def has_integers(self) -> bool:
        """Whether values of its range are whole numbers; a factor need not be one."""
        is_whole = self.is_integer and self.space.times is None
        return is_whole or self.space.distribution == "int_uniform"

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest value of its range."""
        low, high = self.space.min, self.space.max
        assert low is not None and high is not None
        return (math.ceil(low), math.floor(high)) if self.has_integers else (low, high)

    @property
    def num_points(self) -> float:
        """Number of its values in a grid, at most; infinite for a range without one."""
        space = self.space
        if space.values is not None:
            return len(space.values)
        low, high = self.range
        if space.num is not None:
            return space.num
        if space.q is not None:
            return len(_multiples(low, high, space.q))
        return high - low + 1 if space.distribution == "int_uniform" else math.inf

    def problem(self) -> str | None:
        """Returns why there is no value in its range; None if there is one."""
        if self.space.values is not None:
            return None
        low, high = self.range
        if low > high:
            return "there is no whole number from min to max."
        q = self.space.q
        if q is not None and self.has_integers and q != int(q):
            return f"q={q} is not a whole number, and the values are."
        if q is not None and not _multiples(low, high, q):
            return f"there is no multiple of q={q} among the whole numbers there."
        return None


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
    low, high = axis.range
    if space.num is None and space.q is None:
        return list(range(int(low), int(high) + 1))
    if space.num is None:
        assert space.q is not None
        multiples = _multiples(low, high, space.q)
        found = [_tidy(i * space.q, axis, 12) for i in multiples]
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
    num = len(space.values)
    reached = itertools.accumulate(space.probabilities or [1 / num] * num)
    return next((i for i, share in enumerate(reached) if u < share), num - 1)


def is_place(places: Mapping[str, float], axes: Sequence[Axis]) -> bool:
    """Whether there is a place on each of the axes, by name, as `draw` returns it."""
    sizes = {axis.name: len(axis.space.values or ()) for axis in axes}
    return places.keys() == sizes.keys() and all(
        place in range(sizes[name]) if sizes[name] else 0 <= place <= 1
        for name, place in places.items()
    )


def value_at(axis: Axis, place: float) -> Any:
    """Returns the value at a place on an axis, as `draw` returns it."""
    values = axis.space.values
    return _at(place, axis) if values is None else values[int(place)]


def _at(share: float, axis: Axis) -> int | float:
    """Returns the value at a share of a range, from 0 to 1."""
    space, (low, high) = axis.space, axis.range
    if axis.has_integers and not space.is_log and space.q is None and space.num is None:
        return min(int(high), int(low) + int(share * (high - low + 1)))
    if space.is_log:
        value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    else:
        value = low + share * (high - low)
    if space.q is not None:
        multiples = _multiples(low, high, space.q)
        number = min(multiples[-1], max(multiples[0], round(value / space.q)))
        return _tidy(number * space.q, axis, 12)
    if 0 < share < 1:
        value = _tidy(value, axis, _DIGITS)
    else:
        value = low if share == 0 else high
    return min(high, max(low, value))


def _tidy(value: float, axis: Axis, digits: int) -> int | float:
    """Rounds a value to significant digits, as names and files show it."""
    if axis.has_integers:
        return round(value)
    return float(f"{value:.{digits}g}")

"""The axes of parallel coordinates: one for each varied setting, and the metric."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxlora.config.configuration_names import number_text, value_text
from jaxlora.sweeps.importance import is_number
from jaxlora.sweeps.ranking import SweepReport

_MOST_TICKS = 7
_LOG_FROM = 20.0  # ratio of the largest to the smallest number


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParallelAxis:
    """One axis.

    Attributes:
        name: The setting.
        places: Place of each configuration on it, from 0 (bottom) to 1, in the order of
            the ranking.
        ticks: (place, text) of the values that are written beside it.
    """

    name: str
    places: tuple[float, ...]
    ticks: tuple[tuple[float, str], ...]


def parallel_axes(report: SweepReport) -> list[ParallelAxis]:
    """Returns the axes of all varied settings, and of the metric."""
    names = [trial.settings.name for trial in report.trials]
    columns = {
        key: [column[name] for name in names] for key, column in report.varied.items()
    }
    axes = [_axis(name, values) for name, values in columns.items()]
    costs = list(report.costs.values())
    worst = max(filter(math.isfinite, costs), default=0.0)
    values = [report.metric.cost(c if math.isfinite(c) else worst) for c in costs]
    return [*axes, _axis(report.metric_name, values)]


def _axis(name: str, values: Sequence[Any]) -> ParallelAxis:
    distinct = {value_text(value): value for value in values}
    is_numeric = all(map(is_number, values))
    if is_numeric:
        distinct = {value_text(value): value for value in sorted(values)}
    if is_numeric and len(distinct) > _MOST_TICKS:
        return _range(name, values)
    last = max(1, len(distinct) - 1)
    order = list(distinct) if is_numeric else sorted(distinct)
    places = {text: place / last for place, text in enumerate(order)}
    ticks = [(place, text) for text, place in places.items()]
    if len(ticks) > 4 * _MOST_TICKS:
        ticks = [ticks[0], ticks[-1]]
    return ParallelAxis(
        name=name,
        places=tuple(places[value_text(value)] for value in values),
        ticks=tuple(ticks),
    )


def _range(name: str, values: Sequence[float]) -> ParallelAxis:
    low, high = min(values), max(values)
    is_log = low > 0 and high / low >= _LOG_FROM
    scaled = [math.log(v) if is_log else float(v) for v in values]
    first, last = min(scaled), max(scaled)
    middle = math.exp((first + last) / 2) if is_log else (first + last) / 2
    return ParallelAxis(
        name=name,
        places=tuple((s - first) / (last - first) for s in scaled),
        ticks=tuple(
            (place, number_text(value))
            for place, value in ((0.0, low), (0.5, middle), (1.0, high))
        ),
    )

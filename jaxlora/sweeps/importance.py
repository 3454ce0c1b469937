"""Share of the variance between configurations that each setting alone explains."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlora.config.configuration_names import value_text

_MOST_VALUES = 6  # of a number that is not divided into ranges
_NUM_RANGES = 4


def importance(
    varied: Mapping[str, Mapping[str, Any]], losses: Mapping[str, float]
) -> dict[str, float]:
    """Returns the share of the variance of places that each setting explains alone.

    It is one minus the variance within groups of equal values over the whole variance,
    both without bias (epsilon squared, Kelley 1935), and 0 if that is negative. Places
    are compared rather than losses, as a configuration that diverges would outweigh all
    others. Numbers of many values are divided into four ranges of as many
    configurations each.

    Args:
        varied: Value of each setting, by setting and configuration.
        losses: Loss of each configuration; those without are left out.

    Returns:
        The shares by setting, the largest first.
    """
    names = [name for name, loss in losses.items() if np.isfinite(loss)]
    places = _places([losses[name] for name in names])
    found = {
        setting: _explained(_groups([column[name] for name in names]), places)
        for setting, column in varied.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _places(losses: list[float]) -> np.ndarray:
    """Returns the places of losses; equal ones have the mean of theirs."""
    values, which, counts = np.unique(losses, return_inverse=True, return_counts=True)
    if not len(values):
        return np.zeros(0)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _groups(values: list[Any]) -> np.ndarray:
    """Numbers the groups of equal, or similar, values."""
    _, which = np.unique([value_text(v) for v in values], return_inverse=True)
    numbers = [value for value in values if is_number(value)]
    if len(numbers) < len(values) or len(set(numbers)) <= _MOST_VALUES:
        return which
    borders = np.quantile(numbers, np.arange(1, _NUM_RANGES) / _NUM_RANGES)
    return np.searchsorted(borders, numbers)


def _explained(groups: np.ndarray, places: np.ndarray) -> float:
    num_groups, count = len(np.unique(groups)), len(places)
    if num_groups < 2 or count <= num_groups or not places.std():
        return 0.0
    within = sum(
        float(((p := places[groups == group]) - p.mean()).__pow__(2).sum())
        for group in np.unique(groups)
    )
    whole = float(((places - places.mean()) ** 2).sum())
    return max(0.0, 1 - within / (count - num_groups) * (count - 1) / whole)

"""Divides the layers of a model into pipeline stages by their cost; no JAX."""

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction


def cut_layers(layer_costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Divides layers into contiguous stages, so that the slowest one is fastest.

    Among the divisions with the same slowest stage, the one with the smallest sum of
    squared stage costs is taken, as it is the most even. If there are several of these,
    earlier stages get fewer layers, because they keep more microbatches in flight. The
    result is exact: costs are compared without rounding.

    Args:
        layer_costs: Cost of each layer, in any unit.
        num_stages: Number of stages (S).

    Returns:
        Borders, S + 1 numbers from 0 to L: stage s has the layers from `borders[s]` to
        `borders[s + 1] - 1`.

    Raises:
        ValueError: There are fewer layers than stages, or a cost is negative or not
            finite.
    """
    num_layers = len(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"num_layers={num_layers} cannot be divided into num_stages={num_stages} "
            f"pipeline stages of at least one layer each. Use 1 to {num_layers}."
        )
    bad = [cost for cost in layer_costs if not 0 <= cost < math.inf]
    if bad:
        raise ValueError(f"a cost is {bad[0]}, but costs are finite and at least 0.")
    sums = [0, *itertools.accumulate(_as_integers(layer_costs))]
    stage_cost = lambda start, stop: sums[stop] - sums[start]

    slowest, _ = _cheapest(stage_cost, num_layers, num_stages, max)
    _, borders = _cheapest(
        stage_cost, num_layers, num_stages, lambda cost, rest: cost**2 + rest, slowest
    )
    return borders


def _as_integers(costs: Sequence[float]) -> list[int]:
    """Returns the costs in a unit of which each is a multiple."""
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _cheapest(
    stage_cost: Callable[[int, int], int],
    num_layers: int,
    num_stages: int,
    add: Callable[[int, int], int],
    limit: float = math.inf,
) -> tuple[int, tuple[int, ...]]:
    """Returns the smallest value of any division, and the first such division.

    Args:
        stage_cost: Cost of a stage, by its first layer and the one after its last.
        num_layers: Number of layers.
        num_stages: Number of stages.
        add: Returns the value of a division from its first stage's cost and the value
            of the other stages, in which it must not decrease.
        limit: Largest cost that a stage may have; some division must obey it.
    """
    # The value and borders of the best division of the layers from each one on.
    best: dict[int, tuple[int, tuple[int, ...]]] = {num_layers: (0, (num_layers,))}
    for stage in reversed(range(num_stages)):
        rest, best = best, {}
        for start in range(stage, num_layers) if stage else (0,):
            divisions = [
                (add(cost, value), (start, *borders))
                for stop, (value, borders) in rest.items()
                if stop > start and (cost := stage_cost(start, stop)) <= limit
            ]
            if divisions:
                best[start] = min(divisions)
    return best[0]

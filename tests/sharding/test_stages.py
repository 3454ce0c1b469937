"""Dividing layers into stages, compared with all possible divisions."""

import itertools
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxlora.sharding.stages import cut_layers

COSTS = st.sampled_from([0.0, 0.1, 0.2, 1 / 3, 1.0, 2.5, 1e-300, 1e300])


def stage_costs(borders, costs):
    return [
        sum(map(Fraction, costs[a:b]), Fraction(0))
        for a, b in itertools.pairwise(borders)
    ]


def brute_force(costs, num_stages):
    """The best of all divisions, by the rules of `cut_layers`."""
    inner = itertools.combinations(range(1, len(costs)), num_stages - 1)

    def rank(borders):
        stages = stage_costs(borders, costs)
        return max(stages), sum(cost**2 for cost in stages), borders

    return min(((0, *cuts, len(costs)) for cuts in inner), key=rank)


@hypothesis.given(st.lists(COSTS, min_size=1, max_size=7), st.data())
def test_finds_the_best_division(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    found = cut_layers(costs, num_stages)
    assert found == brute_force(costs, num_stages)


@pytest.mark.parametrize(
    ("num_stages", "first", "last", "borders"),
    [
        (1, 0, 0, (0, 8)),
        (4, 0, 0, (0, 2, 4, 6, 8)),
        (8, 0, 0, tuple(range(9))),
        # Earlier stages have fewer layers, as they keep more microbatches in flight.
        (3, 0, 0, (0, 2, 5, 8)),
        # The head costs as much as two layers.
        (2, 0, 0.2, (0, 5, 8)),
        (2, 0.2, 0.2, (0, 4, 8)),
        (2, 0, 99.0, (0, 7, 8)),
    ],
)
def test_divisions_of_eight_layers(num_stages, first, last, borders):
    """The embedding and the head count to the layers at the ends."""
    costs = [0.1 + first, *[0.1] * 6, 0.1 + last]
    assert cut_layers(costs, num_stages) == borders


@pytest.mark.parametrize("num_stages", [0, 4])
def test_each_stage_has_a_layer(num_stages):
    with pytest.raises(ValueError, match=f"num_layers=3 .*={num_stages} .* 1 to 3\\."):
        cut_layers([1.0] * 3, num_stages)


@pytest.mark.parametrize("cost", [-1.0, float("inf"), float("nan")])
def test_costs_that_are_refused(cost):
    with pytest.raises(ValueError, match=f"a cost is {cost}"):
        cut_layers([1.0, cost], 2)

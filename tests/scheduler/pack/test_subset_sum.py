"""Tests that the subsets are the heaviest that fit."""

import itertools

import hypothesis
import hypothesis.strategies as st

from jaxlora.scheduler.pack.fill import best_subsets


@hypothesis.settings(deadline=None)
@hypothesis.given(
    weights=st.lists(st.integers(1, 60), max_size=9),
    room=st.integers(-1, 200),
)
def test_equals_brute_force(weights, room):
    subsets = [
        sum(c)
        for k in range(1, len(weights) + 1)
        for c in itertools.combinations(weights, k)
    ]
    fitting = {total for total in subsets if total <= room}
    found = [[weights[i] for i in s] for s in best_subsets(weights, room)]
    sums = [sum(f) for f in found]
    best = max(fitting, default=0)
    assert max(sums, default=0) == best
    assert sums == sorted(set(sums), reverse=True)
    assert set(sums) <= fitting

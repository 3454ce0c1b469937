"""Tests that fits recover known models and report their errors."""

import numpy as np
import pytest

from jaxlora.scheduler import AffineCost
from jaxlora.scheduler.calibrate import TimePoint, fit_time

SHAPES = [(n * length, n * length**2) for n in (1, 2, 8) for length in (64, 512, 4096)]


def points(true, noise=0.0):
    rng = np.random.default_rng(0)
    return [
        TimePoint(tokens=t, squares=q, seconds=true(t, q) * (1 + noise * rng.normal()))
        for t, q in SHAPES
    ]


def test_recovers_the_cost():
    true = AffineCost(base=1e-3, per_token=2e-6, per_square=3e-11)
    cost, mape = fit_time(points(true))
    assert cost.base == pytest.approx(true.base)
    assert cost.per_token == pytest.approx(true.per_token)
    assert cost.per_square == pytest.approx(true.per_square)
    assert mape < 1e-9


def test_reports_the_mean_error():
    true = AffineCost(base=1e-3, per_token=2e-6, per_square=3e-11)
    assert 0.02 < fit_time(points(true, 0.1))[1] < 0.15


def test_no_coefficient_is_negative():
    """Without constraints, the best fit would have a negative coefficient."""
    falling = [
        TimePoint(tokens=t, squares=q, seconds=1 + 1e-3 * t - 1e-8 * q)
        for t, q in SHAPES
        if 1e-3 * t > 1e-8 * q
    ]
    cost, _ = fit_time(falling)
    assert cost.per_square == 0
    assert min(cost.base, cost.per_token) > 0


@pytest.mark.parametrize(
    "few", [[(100, 10000)] * 5, [(100, 10000), (200, 20000), (400, 40000)]]
)
def test_refuses_points_that_do_not_determine_the_model(few):
    """With a single length, tokens and squares are proportional."""
    same = [TimePoint(tokens=t, squares=q, seconds=1.0) for t, q in few]
    with pytest.raises(ValueError, match="Measure several numbers of tokens"):
        fit_time(same)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_invalid_measurements(seconds):
    with pytest.raises(ValueError, match="must be positive and finite"):
        fit_time([TimePoint(tokens=1, squares=1, seconds=seconds)])

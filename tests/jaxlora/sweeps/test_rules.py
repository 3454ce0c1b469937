"""Rules of early exit on curves that show what each is for, and on random ones."""

import itertools
import math

import numpy as np
import pytest

from jaxlora.config.sweep_config import ExitRule, Metric
from jaxlora.sweeps.rules import Curve, Stop, cut, is_late, judge, rungs

HALVING = ExitRule(type="halving")


def curve(*losses: float, num_steps: int = 0, every: int = 1, **more) -> Curve:
    """A curve that is evaluated before step 1, and then every so many steps."""
    points = [(every * i, loss) for i, loss in enumerate(losses)]
    step = points[-1][0] if points else 0
    return Curve(num_steps=num_steps or step, points=points, **{"step": step} | more)


def judged(name: str, curves, *rules: str, **settings) -> str | None:
    made = [ExitRule(type=rule, **settings) for rule in rules]
    stop = judge(name, curves, made)
    return None if stop is None else stop.rule


def test_rungs_are_shares_of_a_configurations_own_steps():
    assert rungs(HALVING, 120) == [30, 60]
    assert rungs(HALVING, 10) == [3, 5]
    assert rungs(HALVING, 1) == [1, 1]
    assert rungs(ExitRule(type="asha", eta=3, first=0.1), 100) == [10, 30, 90]
    assert rungs(ExitRule(type="halving", first=0.5), 7) == [4]


def test_divergence():
    assert judged("a", {"a": curve(3.0, 3.2)}) is None
    assert judged("a", {"a": curve(3.0, 3.2, 3.05)}) is None
    assert judged("a", {"a": curve(3.0, 3.05, 3.2)}) is None
    assert judged("a", {"a": curve(3.0, 3.2, 3.2)}) == "divergence"
    assert judged("a", {"a": curve(3.0, 1.0, 3.2, 3.2)}) == "divergence"


def test_overfitting_is_measured_by_the_noise_of_the_curve():
    rng = np.random.default_rng(0)
    falls = 1 + np.exp(-np.arange(24) / 4)
    rises = falls + np.maximum(0, np.arange(24) - 12) * 0.05
    for _ in range(20):
        noise = 0.01 * rng.normal(size=24)
        assert judged("a", {"a": curve(*falls + noise)}, "overfitting") is None
        assert judged("a", {"a": curve(*rises + noise)}, "overfitting") == "overfitting"
        plateau = {"a": curve(*(2 + 10 * noise))}
        assert judged("a", plateau, "overfitting") is None
    assert judged("a", {"a": curve(*rises)}) is None  # it is asked for by name


def test_the_median_is_that_of_mean_losses():
    others = {str(i): curve(9.0, 3.0, 2.0, 1.0, num_steps=4) for i in range(5)}
    assert judged("a", others | {"a": curve(9, 3, 2.1, num_steps=4)}, "median") is None
    best_first = curve(9, 2.4, 2.6, num_steps=4)
    assert judged("a", others | {"a": best_first}, "median") is None
    assert judged("a", others | {"a": curve(9, 3, 2.6, num_steps=4)}, "median")
    assert judged("a", others | {"a": curve(9, 8, num_steps=4)}, "median") is None
    few = dict(itertools.islice(others.items(), 4))
    assert judged("a", few | {"a": curve(9, 3, 2.6, num_steps=4)}, "median") is None
    later = {name: curve(9.0, 3.0, num_steps=4) for name in others}
    assert judged("a", later | {"a": curve(9, 3, 2.6, num_steps=4)}, "median") is None


def test_asha_compares_with_what_has_come_before():
    at = {
        n: curve(9.0, loss, num_steps=4)
        for n, loss in zip("abc", (1, 2, 3), strict=True)
    }
    assert judged("a", {"a": at["c"]}, "asha") is None  # the first to come
    assert judged("a", {"a": at["c"], "b": at["b"]}, "asha") == "asha"
    assert judged("b", at, "asha") is None  # 2 is the median of 1 and 3
    assert judged("c", at, "asha") == "asha"
    # Others are looked at where they were at their own rung.
    twice = curve(9, 9, 2, 2.5, num_steps=8)
    assert judged("b", {"x": twice, "b": at["b"]}, "asha") is None
    assert judged("c", {"x": twice, "c": at["c"]}, "asha") == "asha"
    # Between rungs, nothing is compared.
    late = curve(9, 9, 9, 9.05, num_steps=4)
    assert judged("z", at | {"z": late}, "asha") is None


def test_catch_up_counts_those_that_gained_as_much():
    ended = {str(i): curve(4, 3, 3, 2, 1.9, 1.8) for i in range(40)}
    needs = {"a": curve(5, 4, 3.7, 3.5, num_steps=5)}
    assert judged("a", ended | needs, "catch_up") == "catch_up"  # 1.7; they gained 0.2
    near = {"a": curve(4, 3, 3, 1.95, num_steps=5)}
    assert judged("a", ended | near, "catch_up") is None
    few = dict(itertools.islice(ended.items(), 15))
    assert judged("a", few | needs, "catch_up") is None  # 1/16 is above 5 %
    jumps = {f"j{i}": curve(5, 4, 4, 4, 2, 1.8) for i in range(3)}
    assert judged("a", ended | jumps | needs, "catch_up") is None  # 4/44


@pytest.mark.parametrize("seed", range(20))
def test_halving_keeps_the_best_half(seed):
    """As its definition, on random curves of different lengths."""
    rng = np.random.default_rng(seed)
    eta, count = int(rng.integers(2, 5)), int(rng.integers(1, 30))
    rule = ExitRule(type="halving", eta=eta)
    lengths = rng.integers(5, 200, size=count)
    losses = rng.choice(np.arange(40) / 10, size=count)  # some are equal
    failed = rng.random(count) < 0.2
    failed[0] = False
    curves = {}
    for i, (num_steps, loss) in enumerate(zip(lengths, losses, strict=True)):
        step = rungs(rule, int(num_steps))[0]
        points = [(0, 9.0)] + ([] if failed[i] else [(step, float(loss))])
        curves[f"c{i}"] = Curve(
            num_steps=int(num_steps),
            step=0 if failed[i] else step,
            points=points,
            is_over=bool(failed[i]),
            has_failed=bool(failed[i]),
        )
    found = cut(curves, rule, 0)
    assert found is not None
    assert all(f" of {count} at step" in s.reason for s in found.stops.values())
    order = np.argsort(np.where(failed, math.inf, losses), kind="stable")
    kept = {f"c{i}" for i in order[: math.ceil(count / eta)]}
    assert found.stops.keys() == curves.keys() - kept - {
        f"c{i}" for i in np.flatnonzero(failed)
    }


def test_a_rung_waits_for_all_that_go_on():
    at = curve(9.0, 1.0, num_steps=4)
    before = curve(9.0, num_steps=4)
    assert cut({"a": at, "b": before}, HALVING, 0) is None
    for over in ({"is_over": True}, {"is_held": True}):
        found = cut({"a": at, "b": curve(9.0, num_steps=4, **over)}, HALVING, 0)
        assert found is not None and found.cutoffs == (1.0,) and not found.stops
    assert cut({}, HALVING, 0) is None
    assert cut({"b": curve(9.0, num_steps=4, is_over=True)}, HALVING, 0) is None
    # One that began behind the rung, as a clone may, is not compared there.
    clone = Curve(num_steps=4, step=2, points=[(2, 0.5)])
    found = cut({"a": at, "clone": clone}, HALVING, 0)
    assert found is not None and found.cutoffs == (1.0,) and not found.stops


def test_a_rung_compares_the_losses_of_equal_metrics():
    """Not the order in which the configurations are given."""
    exact = Metric(name="exact_match")
    curves = {
        name: curve(0.0, 0.0, num_steps=4, metric=exact, losses=[(0, 3.0), (1, loss)])
        for name, loss in (("a", 2.5), ("b", 1.5), ("c", 2.0), ("d", 1.0))
    }
    found = cut(curves, HALVING, 0)
    assert found is not None and set(found.stops) == {"a", "c"}


def test_later_rungs_compare_those_that_are_left():
    four = {n: curve(9, i, 8 - i, num_steps=4) for i, n in enumerate("abcd")}
    first = cut({n: curve(9, i, num_steps=4) for i, n in enumerate("abcd")}, HALVING, 0)
    assert first is not None and set(first.stops) == {"c", "d"}
    assert first.cutoffs == (1,) and "place 3 of 4" in first.stops["c"].reason
    gone = {n: curve(9, i, num_steps=4, is_over=True) for i, n in ((2, "c"), (3, "d"))}
    second = cut({"a": four["a"], "b": four["b"]} | gone, HALVING, 1)
    assert second is not None and set(second.stops) == {"a"}  # b is better by now
    assert "place 2 of 2" in second.stops["a"].reason


def test_who_comes_late_is_compared_with_the_decision():
    cutoffs = [1.0]
    assert is_late(curve(9, 1.0, num_steps=4), HALVING, cutoffs) is None
    found = is_late(curve(9, 1.1, num_steps=4), HALVING, cutoffs)
    assert isinstance(found, Stop) and "those up to 1.000 went on" in found.reason
    assert is_late(curve(9, 1, 5.0, num_steps=4), HALVING, cutoffs) is None
    assert is_late(curve(9, 5.0, num_steps=9), HALVING, cutoffs) is None


def sweep(losses: np.ndarray, rule: str) -> tuple[float, float]:
    """Replays a sweep of equal lengths; returns the work and the best loss."""
    count, num_evals = losses.shape
    curves = {str(i): curve(num_steps=num_evals - 1) for i in range(count)}
    over: set[str] = set()
    work = 0
    for step in range(num_evals):
        for name in curves.keys() - over:
            seen = losses[int(name), : step + 1]
            curves[name] = curve(*seen.tolist(), num_steps=num_evals - 1)
        work += len(curves.keys() - over) * (step > 0)
        stops = {n for n in curves.keys() - over if judged(n, curves, rule)}
        if rule == "halving" and step in (places := rungs(HALVING, num_evals - 1)):
            found = cut(curves, HALVING, places.index(step))
            assert found is not None
            stops |= found.stops.keys()
        for name in stops:
            over.add(name)
            seen = dict(curves[name].points).values()
            curves[name] = curve(*seen, num_steps=num_evals - 1, is_over=True)
    best = min(found.best for found in curves.values())
    return work / (count * (num_evals - 1)), best


@pytest.mark.parametrize(
    ("rule", "work"), [("halving", 0.5), ("asha", 0.65), ("median", 0.85)]
)
def test_rules_save_work_and_keep_the_best(rule, work):
    """On curves that fall to different floors at different speeds, with noise."""
    rng = np.random.default_rng(3)
    for _ in range(5):
        floor, speed = 1 + rng.random(40), 0.1 + 0.4 * rng.random(40)
        steps = np.arange(25)
        losses = floor[:, None] + 3 * np.exp(-speed[:, None] * steps)
        losses += 0.01 * rng.normal(size=losses.shape)
        done, best = sweep(losses, rule)
        assert done <= work + 0.01
        assert best <= losses.min() + 0.05

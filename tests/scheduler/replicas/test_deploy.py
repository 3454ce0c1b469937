"""Tests the choice of a deployment, and its lower bound."""

import numpy as np
import pytest

from jaxlora.scheduler import AffineCost
from jaxlora.scheduler.replicas import (
    Deployment,
    ReplicaKind,
    best_uniform,
    dispatch,
    plan_deployment,
    useful_kinds,
)
from tests.scheduler.replicas.mixes import (
    all_deployments,
    best_dispatch,
    fluid_step,
    paper_kinds,
    random_kinds,
    random_steps,
)


def kind(**fields) -> ReplicaKind:
    cost = AffineCost(base=1.0, per_token=1.0, per_square=0.0)
    return ReplicaKind(**({"longest": 100, "cost": cost} | fields))


@pytest.mark.parametrize("seed", range(8))
def test_plans_are_near_the_best_of_all_deployments_and_none_is_below_the_bound(seed):
    rng = np.random.default_rng([5, seed])
    kinds, num_gpus = random_kinds(rng), int(rng.integers(4, 8))
    longest = max(kind.longest for kind in kinds)
    steps = [
        np.clip(rng.lognormal(5.5, 0.8, 40), 1, longest).astype(int) for _ in range(4)
    ]
    planned = plan_deployment(kinds, num_gpus, steps)
    needed = max(int(step.max()) for step in steps)
    values = {}
    for deployment in all_deployments(kinds, num_gpus, needed):
        values[deployment] = np.mean([fluid_step(deployment, s) for s in steps])
    best = min(values.values())
    assert planned.bound <= best * (1 + 1e-6)
    assert planned.bound >= 0.93 * best
    assert values[planned.deployment] <= 1.01 * best
    assert planned.deployment.num_gpus <= num_gpus
    assert planned.deployment.longest >= needed


@pytest.mark.parametrize(
    "num_gpus, num_samples, seeds, most",
    [(16, 512, 4, 1.02), (64, 2048, 1, 1.02), (512, 16384, 1, 1.05)],
)
def test_mean_steps_are_near_the_bound(num_gpus, num_samples, seeds, most):
    gaps, saved = [], []
    for seed in range(seeds):
        steps = random_steps(seed, num_samples, 100 if num_gpus < 100 else 30)
        planned = plan_deployment(paper_kinds(), num_gpus, steps)
        gaps.append(planned.gap)
        uniform = best_uniform(paper_kinds(), num_gpus, steps)
        saved.append(1 - planned.seconds / uniform.seconds)
        assert planned.bound <= planned.seconds
        assert uniform.seconds >= planned.bound
    assert np.mean(gaps) <= most
    assert min(saved) > 0.2


def test_the_predicted_step_is_that_of_dispatched_steps():
    steps = random_steps(3, 256, 40)
    planned = plan_deployment(paper_kinds(), 16, steps)
    found = [dispatch(planned.deployment, step).seconds for step in steps]
    assert planned.seconds == pytest.approx(np.mean(found), rel=0.01)


def test_replicas_of_one_kind_hold_the_longest_sample():
    steps = random_steps(3, 64, 5, longest=5000)
    planned = best_uniform(paper_kinds(), 16, steps)
    assert planned.deployment.counts == (4,)
    assert planned.deployment.longest == 8192
    short = best_uniform(paper_kinds(), 16, [np.array([2000] * 32)])
    assert short.deployment.counts == (16,)


def test_kinds_that_another_one_replaces_are_left_out():
    slow = AffineCost(base=1.0, per_token=2.0, per_square=0.0)
    best, tall = kind(tensor=2), kind(tensor=4, longest=300)
    worse = [kind(stage=2, cost=slow), kind(tensor=4), kind(tensor=2, longest=90)]
    steps = [np.array([10, 95, 300])]
    assert useful_kinds([*worse, best, tall], steps) == (best, tall)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_kind_that_holds_no_sample_is_left_out():
    tiny, large = kind(longest=5), kind(tensor=4, longest=300)
    steps = [np.array([10, 95, 300])]
    assert useful_kinds([tiny, large], steps) == (large,)
    assert plan_deployment([tiny, large], 8, steps).deployment.counts == (2,)


def test_a_replica_is_left_out_of_a_step_that_is_shorter_than_its_base():
    """Its base is paid where it pays, not in every step."""
    cheap = kind(longest=300)
    ramp = kind(
        stage=2,
        longest=1000,
        cost=AffineCost(base=500.0, per_token=0.5, per_square=0.0),
    )
    steps = [np.array([50, 60]), np.array([900, 50])]
    planned = plan_deployment([cheap, ramp], 4, steps)
    means = [
        np.mean([dispatch(one, step).seconds for step in steps])
        for one in all_deployments((cheap, ramp), 4, 900)
    ]
    assert planned.bound <= min(means) * (1 + 1e-9)
    assert planned.seconds == pytest.approx(min(means))


@pytest.mark.parametrize("seed", [53, 54, 56])
def test_steps_shorter_than_a_base_are_bounded_like_the_best_of_all(seed):
    """Replicas with a large base get samples in the long step alone."""
    rng = np.random.default_rng([11, seed])
    draw = lambda low, high: float(rng.uniform(low, high))
    costs = [AffineCost(base=0.0, per_token=1.0, per_square=0.0)]
    for most, each in ((600, 0.6), (100, 0.9)):
        base, per_token = draw(50 if most > 100 else 0, most), draw(0.3, each)
        costs.append(AffineCost(base=base, per_token=per_token, per_square=0.0))
    kinds = (
        kind(longest=300, cost=costs[0]),
        kind(tensor=2, longest=1000, cost=costs[1]),
        kind(tensor=3, longest=1000, cost=costs[2]),
    )
    steps = [rng.integers(10, 100, 2) for _ in range(3)]
    steps.append(np.append(rng.integers(10, 100, 1), rng.integers(300, 1000, 2)))
    planned = plan_deployment(kinds, 5, steps)
    best = min(
        np.mean([best_dispatch(one, step) for step in steps])
        for one in all_deployments(kinds, 5, int(steps[-1].max()))
    )
    assert planned.bound <= best * (1 + 1e-9)
    assert planned.seconds <= 1.2 * best  # samples are few and cannot be divided


@pytest.mark.parametrize(
    "kinds, steps, message",
    [
        ([kind()], [], "there are no samples"),
        ([kind()], [np.array([101])], "101 tokens fits into no replica"),
        ([kind(tensor=8)], [np.array([50])], "fits into no replica"),
    ],
)
def test_refusals(kinds, steps, message):
    for choose in (plan_deployment, best_uniform):
        with pytest.raises(ValueError, match=message):
            choose(kinds, 4, steps)


def test_values_are_checked():
    with pytest.raises(ValueError, match="tensor=0 of a replica must be at least 1"):
        kind(tensor=0)
    with pytest.raises(ValueError, match="must have a number for each of the 1 kinds"):
        Deployment(kinds=(kind(),), counts=(1, 2))
    with pytest.raises(ValueError, match="at least one replica"):
        Deployment(kinds=(kind(),), counts=(0,))


def test_gpus_of_larger_replicas_come_first():
    deployment = Deployment(kinds=paper_kinds(), counts=(2, 1, 0, 1))
    assert deployment.gpus == ((10,), (11,), (8, 9), tuple(range(8)))
    assert str(deployment) == "2 x tensor=1 + 1 x tensor=2 + 1 x tensor=8"

"""Tests the dispatch of a step's samples to replicas, and its lower bound."""

import numpy as np
import pytest

from jaxlora.scheduler.replicas import Deployment, dispatch, step_bound
from tests.scheduler.replicas.mixes import (
    best_dispatch,
    ends_of,
    fluid_step,
    paper_kinds,
    random_kinds,
    random_steps,
)

SIXTEEN = Deployment(kinds=paper_kinds(), counts=(4, 2, 0, 1))


def random_deployment(rng) -> Deployment:
    kinds = random_kinds(rng)
    return Deployment(kinds=kinds, counts=tuple(int(n) for n in rng.integers(1, 3, 3)))


@pytest.mark.parametrize("seed", range(40))
def test_no_dispatch_is_below_the_bound_and_ends_are_those_of_the_samples(seed):
    rng = np.random.default_rng([2, seed])
    deployment = random_deployment(rng)
    num_samples = int(rng.integers(0, 60))
    lengths = rng.integers(1, deployment.longest + 1, num_samples)
    start = rng.uniform(0, 500, deployment.num_replicas) if seed % 2 else None
    found = dispatch(deployment, lengths, start=start)
    expected = ends_of(deployment, lengths, found.replica_of, start)
    np.testing.assert_allclose(found.ends, expected, rtol=1e-9)
    busy = found.ends[np.unique(found.replica_of)]
    assert found.bound <= busy.max(initial=0.0) * (1 + 1e-9)
    assert 0 <= found.idle <= 1


@pytest.mark.parametrize("seed", range(12))
def test_small_steps_are_near_the_best_dispatch_of_all(seed):
    rng = np.random.default_rng([3, seed])
    deployment = Deployment(kinds=random_kinds(rng, 2), counts=(2, 1))
    lengths = rng.integers(1, deployment.longest + 1, 7)
    start = rng.uniform(0, 500, 3) if seed % 2 else None
    best = best_dispatch(deployment, lengths, start)
    found = dispatch(deployment, lengths, start=start)
    last = found.ends[np.unique(found.replica_of)].max()
    assert found.bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= last <= 1.15 * best


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_is_that_of_divisible_samples(seed):
    rng = np.random.default_rng([4, seed])
    deployment = random_deployment(rng)
    lengths = rng.integers(1, deployment.longest + 1, 300)
    fluid = fluid_step(deployment, lengths)
    bound = step_bound(deployment, lengths).seconds
    assert bound <= fluid * (1 + 1e-9)  # no sample is near it alone
    assert bound >= 0.9995 * fluid


def test_a_step_is_no_shorter_than_its_longest_sample():
    bound = step_bound(SIXTEEN, np.array([16384, 20, 20]))
    kind = SIXTEEN.kinds[-1]
    assert bound.seconds == pytest.approx(kind.cost(16384, 16384**2))


def test_a_replica_without_samples_takes_no_time():
    found = dispatch(SIXTEEN, [100])
    assert np.count_nonzero(found.ends) == 1
    assert dispatch(SIXTEEN, []).seconds == 0


@pytest.mark.parametrize(
    "counts, num_samples, most, mean",
    [
        ((4, 2, 0, 1), 512, 1.001, 1.0005),
        ((24, 10, 3, 1), 2048, 1.01, 1.003),
        ((214, 89, 22, 4), 16384, 1.01, 1.005),
    ],
)
def test_steps_of_many_samples_reach_the_bound(counts, num_samples, most, mean):
    deployment = Deployment(kinds=paper_kinds(), counts=counts)
    steps = random_steps(0, num_samples, 10 if num_samples < 10000 else 2)
    found = [dispatch(deployment, step) for step in steps]
    over = [one.seconds / one.bound for one in found]
    assert max(over) <= most
    assert np.mean(over) <= mean


def test_dispatch_follows_from_its_arguments_alone():
    (step,) = random_steps(1, 512, 1)
    first, again = (dispatch(SIXTEEN, list(step)) for _ in range(2))
    np.testing.assert_array_equal(first.replica_of, again.replica_of)


def test_prices_send_samples_where_they_are_relatively_cheap():
    """One kind is fast for short samples and the other one for long samples."""
    rng = np.random.default_rng(0)
    short, long = random_kinds(rng, 2)
    deployment = Deployment(kinds=(short, long), counts=(4, 2))
    lengths = rng.integers(1, short.longest + 1, 400)
    found = dispatch(deployment, lengths)
    assert found.seconds <= 1.002 * fluid_step(deployment, lengths)


@pytest.mark.parametrize(
    "lengths, start, message",
    [
        ([16385], None, "16385 tokens fits into no replica"),
        ([16], [0.0], "start has 1 numbers, and there are 7 replicas"),
    ],
)
def test_refusals(lengths, start, message):
    with pytest.raises(ValueError, match=message):
        dispatch(SIXTEEN, lengths, start=start)

"""Tests LobRA's own algorithms against all possibilities of small cases."""

import itertools

import numpy as np
import pytest

from jaxlora.scheduler.replicas import Deployment, best_uniform, dispatch, lobra
from jaxlora.scheduler.replicas import plan_deployment as plan
from tests.scheduler.replicas.mixes import (
    all_deployments,
    paper_kinds,
    random_kinds,
    random_steps,
)


@pytest.mark.parametrize("seed", range(8))
def test_boundaries_have_the_least_padding_of_all(seed):
    rng = np.random.default_rng([6, seed])
    lengths = rng.integers(1, 256 * 8, 40)
    num = int(rng.integers(1, 5))
    ends = np.unique(-(-lengths // 256) * 256)
    least = min(
        int((lobra.padded(lengths, np.array([*some, ends[-1]])) - lengths).sum())
        for k in range(num)
        for some in itertools.combinations(ends[:-1].tolist(), k)
    )
    found = lobra.boundaries(lengths, num)
    assert len(found) <= num and (np.diff(found) > 0).all()
    assert int((lobra.padded(lengths, found) - lengths).sum()) == least


@pytest.mark.parametrize("seed", range(6))
def test_the_integer_program_of_a_step_is_the_best_of_all_divisions(seed):
    rng = np.random.default_rng([7, seed])
    deployment = Deployment(kinds=random_kinds(rng, 2), counts=(2, 1))
    small, large = deployment.kinds
    ends = [small.longest // 2, small.longest, large.longest]
    numbers = rng.integers(1, 5, 3)
    seconds, each = lobra.dispatch_step(deployment, np.repeat(ends, numbers))
    best = np.inf
    for first, second in itertools.product(*(range(n + 1) for n in numbers[:2])):
        of_small = np.ceil(np.array([first, second]) / 2)
        of_large = np.array([numbers[0] - first, numbers[1] - second, numbers[2]])
        times = [
            kind.cost.base + float((n * kind.seconds(np.array(ends[: len(n)]))).sum())
            for kind, n in ((small, of_small), (large, of_large))
        ]
        best = min(best, max(times))
    # The program counts the base of replicas without samples, too.
    assert seconds == pytest.approx(best, rel=2e-3)
    assert each.max() == seconds


@pytest.mark.parametrize("seed", range(3))
def test_its_deployment_is_the_best_of_all_by_its_program(seed):
    steps = random_steps(seed, 48, 20, longest=4000)
    kinds = paper_kinds()[:2]
    found, ends = lobra.plan_lobra(kinds, 6, steps)
    counts = np.bincount(np.searchsorted(ends, np.concatenate(steps)))
    mean = np.repeat(ends, np.ceil(counts / 20 - 1e-9).astype(int))
    held = lobra.padded_kinds(kinds)
    best = min(
        lobra.dispatch_step(one, mean)[0]
        for one in all_deployments(held, 6, mean.max())
    )
    assert lobra.dispatch_step(found, mean)[0] == pytest.approx(best, rel=4e-3)


def test_the_designs_of_section_3_are_in_their_order():
    """Fewer seconds: even, by length, balanced, and with buckets of each step."""
    kinds, steps = paper_kinds(), random_steps(3, 512, 60)
    deployment, ends = lobra.plan_lobra(kinds, 16, steps)
    uniform = best_uniform(kinds, 16, steps).deployment
    own = plan(kinds, 16, steps).deployment
    step = steps[0]
    fixed = lobra.padded(step, ends)
    times = [
        lobra.even_step(uniform, fixed),
        lobra.step_by_length(deployment, fixed).max(),
        lobra.dispatch_step(deployment, fixed)[0],
        lobra.dispatch_step(deployment, lobra.padded(step, lobra.boundaries(step)))[0],
        dispatch(own, step).seconds,
    ]
    assert times == sorted(times, reverse=True)


def test_a_bucket_is_shared_evenly_or_by_length():
    kinds = paper_kinds(base=10.0)
    two = Deployment(kinds=kinds[1:2], counts=(2,))
    lengths = np.array([1000] * 3 + [4096])
    each = kinds[1].seconds(np.array([1000, 4096]))
    assert lobra.even_step(two, lengths) == pytest.approx(
        10 + max(3 * each[0], each[1])
    )
    both = Deployment(kinds=kinds[:2], counts=(2, 1))
    by_length = lobra.step_by_length(both, lengths)
    small = kinds[0].seconds(np.array([1000]))[0]
    assert by_length.tolist() == pytest.approx([10 + 2 * small, 10 + each[1]])


def test_kinds_that_are_less_efficient_are_no_candidates():
    rng = np.random.default_rng(0)
    one, two = paper_kinds()[:2]
    lengths = rng.integers(1, 4096, 100)
    slow = paper_kinds()[2]
    assert lobra.candidates([one, two, slow, two], lengths) == (one, two)


def test_refusals():
    kinds = paper_kinds()
    deployment = Deployment(kinds=kinds[:1], counts=(2,))
    for send in (lobra.step_by_length, lobra.dispatch_step):
        with pytest.raises(ValueError, match="3000 tokens fits into no replica"):
            send(deployment, np.array([3000]))
    with pytest.raises(ValueError, match="have 366145 deployments of 4 kinds"):
        lobra.plan_lobra(kinds, 512, random_steps(0, 512, 5))

"""Tests the simulation of steps on replicas, and the decision to move."""

import itertools

import numpy as np
import pytest

from jaxlora.scheduler import AffineCost
from jaxlora.scheduler.replicas import (
    Deployment,
    ReplicaKind,
    dispatch,
    one_after_another,
    plan_deployment,
    simulate_steps,
)
from tests.scheduler.replicas.mixes import paper_kinds, random_kinds, random_steps

DEPLOYMENT = Deployment(kinds=paper_kinds(), counts=(4, 2, 0, 1))


def steps_of_jobs(seed: int, num_steps: int, num_jobs: int = 6):
    steps = random_steps(seed, 128, num_steps)
    return [[step[job::num_jobs] for job in range(num_jobs)] for step in steps]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("barrier", ["job", "step"])
def test_every_rule_holds(seed, barrier):
    """Replicas do one part at a time, and no job begins a step before its last one."""
    rng = np.random.default_rng([8, seed])
    kinds = random_kinds(rng)
    deployment = Deployment(kinds=kinds, counts=(3, 2, 1))
    steps = [
        [rng.integers(1, deployment.longest + 1, n) for n in rng.integers(0, 9, 4)]
        for _ in range(5)
    ]
    found = simulate_steps(deployment, steps, barrier=barrier)
    busy = np.zeros(deployment.num_replicas)
    for replica in range(deployment.num_replicas):
        own = [part for part in found.parts if part.replica == replica]
        for first, then in itertools.pairwise(own):
            assert first.end <= then.start
        busy[replica] = sum(part.end - part.start for part in own)
    np.testing.assert_allclose(busy, found.busy)
    same = (lambda p: p.step) if barrier == "step" else (lambda p: (p.job, p.step))
    groups: dict = {}
    for part in found.parts:
        start, end = groups.get(same(part), (np.inf, 0.0))
        groups[same(part)] = min(start, part.start), max(end, part.end)
    for key, (start, _) in groups.items():
        earlier = [
            end
            for k, (_, end) in groups.items()
            if (k < key if barrier == "step" else k[0] == key[0] and k[1] < key[1])
        ]
        assert start >= max(earlier, default=0.0)
    assert found.seconds == max((part.end for part in found.parts), default=0.0)
    assert (found.idle >= -1e-9).all()


def test_with_a_barrier_for_each_step_its_time_is_the_sum_of_the_dispatches():
    steps = steps_of_jobs(1, 4)
    found = simulate_steps(DEPLOYMENT, steps, barrier="step")
    each = [dispatch(DEPLOYMENT, np.concatenate(step)).seconds for step in steps]
    assert found.seconds == pytest.approx(sum(each))


def test_with_a_barrier_for_each_job_replicas_wait_less():
    """Steps whose long samples are too many for the large replica."""
    steps = steps_of_jobs(2, 12)
    rng = np.random.default_rng(0)
    for step in steps[::2]:
        step[0] = np.append(step[0], rng.integers(12000, 16000, 6))
    by_step = simulate_steps(DEPLOYMENT, steps, barrier="step")
    by_job = simulate_steps(DEPLOYMENT, steps, barrier="job")
    assert by_job.seconds < 0.97 * by_step.seconds
    assert by_job.gpus_idle < 0.6 * by_step.gpus_idle


def test_one_job_waits_for_itself():
    steps = [[step] for step in random_steps(2, 40, 3)]
    by_step = simulate_steps(DEPLOYMENT, steps, barrier="step")
    assert simulate_steps(DEPLOYMENT, steps).seconds >= 0.95 * by_step.seconds


def test_one_job_after_the_other_takes_the_sum_of_their_steps():
    kinds, jobs = paper_kinds(), [random_steps(seed, 64, 5) for seed in range(2)]
    seconds = one_after_another(kinds, 16, jobs, plan_deployment)
    each = [plan_deployment(kinds, 16, steps).seconds for steps in jobs]
    assert seconds == pytest.approx(sum(each))
    rarely = [[*steps, *[np.array([], int)] * 5] for steps in jobs]
    assert one_after_another(kinds, 16, rarely, plan_deployment) == pytest.approx(
        sum(each) / 2
    )


def test_idle_replicas_are_counted_by_their_gpus():
    cost = AffineCost(base=0.0, per_token=1.0, per_square=0.0)
    kinds = tuple(ReplicaKind(tensor=n, longest=100, cost=cost) for n in (1, 3))
    deployment = Deployment(kinds=kinds, counts=(1, 1))
    found = simulate_steps(deployment, [[np.array([100])]])
    idle = found.idle.tolist()
    assert sorted(idle) == [0.0, 1.0]
    assert found.gpus_idle == (0.25 if idle[0] else 0.75)

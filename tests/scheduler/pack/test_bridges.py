"""Tests bridges of other jobs between the batches of a job with most of the work."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    get_packer,
    simulate,
    violations,
)
from jaxlora.scheduler.pack import bridges
from scripts.bench.scheduler.lengths import jobs

FORWARD = AffineCost(base=256, per_token=1, per_square=2e-5)
BACKWARD = AffineCost(base=256, per_token=1, per_square=5e-5)


def cost_of(num_stages, **options):
    return CostModel.uniform(num_stages, forward=FORWARD, backward=BACKWARD, **options)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32), data=st.data())
def test_schedules_are_legal_or_there_is_none(seed, data):
    rng = np.random.default_rng(seed)
    num_stages = data.draw(st.sampled_from([2, 4, 5]))
    in_flight = data.draw(st.sampled_from([None, 2 * num_stages - 1]))
    pipeline = Pipeline.one_f_one_b(num_stages, in_flight)
    limits = Limits(
        capacity=1024,
        block_tokens=32,
        max_samples=data.draw(st.sampled_from([None, 3])),
        max_jobs=data.draw(st.sampled_from([None, 1, 2])),
    )
    buckets = data.draw(st.sampled_from([(), (256, 1024)]))
    samples = [
        Sample(owner=job, batch=batch, index=i, num_tokens=int(rng.integers(1, 1025)))
        for job, num in enumerate((data.draw(st.integers(1, 9)), 2, 1))
        for batch in range(num)
        for i in range(data.draw(st.integers(1, 9 if job == 0 else 3)))
    ]
    cost = cost_of(num_stages, buckets=buckets)
    packed = bridges.pack(samples, limits, pipeline, cost)
    if packed is None:
        return
    schedule = Schedule(microbatches=tuple(packed), limits=limits)
    assert violations(schedule, samples, distance=pipeline.distance) == []
    assert schedule.keeps_numbers
    assert packed == bridges.pack(samples, limits, pipeline, cost)


def pair(rng, ways):
    """Makes a pair with random savings, and work in three ticks."""
    nothing = bridges._Side([], np.zeros((2, 0, 0)), np.zeros(0))
    return bridges._Pair(
        sides=(nothing, nothing),
        saved=rng.uniform(-20, 10, ways),
        levels=rng.uniform(1, 10, (3, ways)),
    )


def test_no_other_choice_of_bridges_saves_more():
    """Choices that take at least as much work are enumerated."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        pairs = [pair(rng, 3) for _ in range(5)]
        totals = {}
        for ways in itertools.product((None, 0, 1, 2), repeat=len(pairs)):
            chosen = {i: way for i, way in enumerate(ways) if way is not None}
            if not any(i + 1 in chosen for i in chosen):
                saved = sum(pairs[i].saved[way] for i, way in chosen.items())
                taken = sum(pairs[i].levels[:, way].sum() for i, way in chosen.items())
                totals[tuple(chosen.items())] = taken, saved
        found = bridges._buy(pairs, 30.0, per_token=4.0)
        assert found is not None
        taken, saved = totals[tuple(found.items())]
        assert taken >= 30
        assert saved >= max(s for t, s in totals.values() if t >= taken) - 1e-9


def test_others_with_too_much_work_are_not_bridges():
    rng = np.random.default_rng(0)
    assert bridges._buy([pair(rng, 3) for _ in range(4)], 61.0, per_token=9.0) is None
    limits, pipeline = Limits(capacity=6144, block_tokens=64), Pipeline.one_f_one_b(4)
    one, equal = (jobs(["mix"] * num, num_samples=16, batch_size=4) for num in (1, 3))
    assert bridges.pack(one, limits, pipeline, cost_of(4)) is None
    assert bridges.pack(equal, limits, pipeline, cost_of(4)) is None


@pytest.mark.parametrize(
    "num_stages, most", [(4, 0.97), pytest.param(8, 0.995, marks=pytest.mark.grid)]
)
def test_a_long_job_drains_less_often(num_stages, most, monkeypatch):
    limits = Limits(capacity=6144, block_tokens=64)
    pipeline, cost = Pipeline.one_f_one_b(num_stages), cost_of(num_stages)
    samples = jobs(["mix"] * 3, num_samples=[64, 8, 8], batch_size=8)
    default = get_packer("joint")(samples, limits, pipeline, cost)
    monkeypatch.setattr(bridges, "pack", lambda *_: None)
    plain = get_packer("joint")(samples, limits, pipeline, cost)
    assert violations(default, samples, distance=num_stages) == []
    times = [simulate(s, cost, pipeline).makespan for s in (default, plain)]
    assert times[0] <= most * times[1]

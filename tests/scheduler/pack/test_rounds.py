"""Tests rounds of small batches that take about equally long."""

import functools

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    get_packer,
    pack_ticks,
    simulate,
    violations,
)
from jaxlora.scheduler.pack import rounds

LIMITS = Limits(capacity=512, block_tokens=32)


def batches_of_one(lengths):
    return [
        Sample(owner=job, batch=batch, index=0, num_tokens=n)
        for job, of_job in enumerate(lengths)
        for batch, n in enumerate(of_job)
    ]


def costs(num_stages):
    one = AffineCost(base=16.0, per_token=1.0, per_square=1e-4)
    return CostModel.uniform(num_stages, forward=one, backward=one)


def shortest(times):
    """Enumerates all ways to choose the jobs of each round."""

    @functools.cache
    def left(state):
        following = [t[i] for t, i in zip(times, state, strict=True) if i < len(t)]
        if not following:
            return 0
        found = []
        for subset in range(1, 2 ** len(times)):
            chosen = [
                j for j, t in enumerate(times) if subset >> j & 1 and state[j] < len(t)
            ]
            if chosen:
                after = tuple(n + (j in chosen) for j, n in enumerate(state))
                found.append(max(times[j][state[j]] for j in chosen) + left(after))
        return min(found)

    return left((0,) * len(times))


TIMES = st.lists(
    st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=2, max_size=4
)


@hypothesis.settings(max_examples=50, deadline=None)  # it enumerates
@hypothesis.given(TIMES)
def test_rounds_are_about_the_shortest(times):
    found, done = 0, [0] * len(times)
    for chosen in rounds._rounds(times):
        found += max(times[j][done[j]] for j in chosen)
        done = [n + (j in chosen) for j, n in enumerate(done)]
    assert done == [len(t) for t in times]
    best = shortest(tuple(map(tuple, times)))
    assert best <= found <= 1.03 * best


LENGTHS = st.lists(
    st.lists(st.integers(1, 512), min_size=1, max_size=6), min_size=2, max_size=6
)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(LENGTHS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 3, 8]))
def test_keeps_every_rule(lengths, num_stages, num_lanes):
    samples = batches_of_one(lengths)
    lanes = Lanes(data=num_lanes, pipeline=Pipeline.one_f_one_b(num_stages))
    ticks = rounds.pack(samples, LIMITS, lanes, costs(num_stages))
    if len(lengths) > num_lanes * num_stages:
        assert ticks is None
        return
    padded = (m for tick in ticks for m in tick + [()] * (num_lanes - len(tick)))
    schedule = Schedule(microbatches=tuple(padded), limits=LIMITS)
    wrong = violations(schedule, samples, distance=num_stages, num_lanes=num_lanes)
    assert wrong == []


def test_long_batches_share_rounds():
    """Two jobs that alternate between long and short batches run out of step."""
    samples = batches_of_one([[64, 480] * 6, [480, 64] * 6])
    pipeline, cost = Pipeline.one_f_one_b(4), costs(4)
    in_step = [
        m
        for batch in range(12)
        for m in (*((s,) for s in samples if s.batch == batch), (), ())
    ]
    schedule = Schedule(microbatches=tuple(in_step), limits=LIMITS)
    before = simulate(schedule, cost, pipeline).makespan
    found = get_packer("joint")(samples, LIMITS, pipeline, cost)
    assert simulate(found, cost, pipeline).makespan < 0.8 * before
    lanes = Lanes(data=2)
    ticks = pack_ticks(samples, LIMITS, "joint", lanes, costs(1))
    steps = simulate(ticks, costs(1), lanes.pipeline, num_lanes=2).makespan
    assert steps == pytest.approx(rounds_time())


def rounds_time():
    """Time of 7 rounds of short batches alone or in pairs, and 6 of long ones."""
    cost = costs(1).stages[0]
    time = lambda n: (cost.forward + cost.backward)(n, n**2)
    return 7 * time(64) + 6 * time(480)


def test_batches_over_a_microbatch_have_no_rounds():
    samples = [
        Sample(owner=job, batch=0, index=i, num_tokens=300)
        for job in range(2)
        for i in range(2)
    ]
    lanes = Lanes(pipeline=Pipeline.one_f_one_b(2))
    assert rounds.pack(samples, LIMITS, lanes, costs(2)) is None

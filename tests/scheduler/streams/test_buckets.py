"""Tests the choice of buckets."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Limits,
    Pipeline,
    Sample,
    simulate,
)
from jaxlora.scheduler.lanes import ticks_of
from jaxlora.scheduler.streams.buckets import choose, pack_quickly, rows_of

LIMITS = Limits(capacity=4096, block_tokens=64)
LANES = Lanes(pipeline=Pipeline.one_f_one_b(4))
PASS = AffineCost(base=64.0, per_token=1.0, per_square=0.0)
COST = CostModel.uniform(4, forward=PASS, backward=PASS)
CANDIDATES = (512, 1024, 2048, 3072)


def samples(num_jobs=1, num_batches=6, each=6, seed=0):
    """Small batches, so that a pipeline with one job has many partial microbatches."""
    rng = np.random.default_rng(seed)
    return [
        Sample(owner=j, batch=b, index=i, num_tokens=int(rng.integers(40, 700)))
        for j, b, i in itertools.product(
            range(num_jobs), range(num_batches), range(each)
        )
    ]


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_two_buckets_are_the_best_pair(num_lanes):
    """No other pair with the capacity takes less time."""
    given, lanes = samples(), dataclasses.replace(LANES, data=num_lanes)

    def time_with(sizes):
        cost = dataclasses.replace(COST, buckets=sizes)
        packed = pack_quickly(given, LIMITS, lanes, cost)
        pipeline = lanes.pipeline
        return simulate(packed, cost, pipeline, num_lanes=num_lanes).makespan

    chosen = choose(given, LIMITS, lanes, COST, candidates=CANDIDATES, max_buckets=2)
    assert chosen.single_bucket_time == time_with((4096,))
    assert chosen.time == min(time_with((c, 4096)) for c in CANDIDATES)
    assert chosen.time == time_with(chosen.sizes)
    assert chosen.time < 0.8 * chosen.single_bucket_time
    assert chosen.fill > 1.2 * chosen.single_bucket_fill


def test_lanes_of_a_tick_share_the_bucket_of_the_longest():
    given, lanes = samples(num_jobs=2), dataclasses.replace(LANES, data=2)
    cost = dataclasses.replace(COST, buckets=(1024, 4096))
    packed = pack_quickly(given, LIMITS, lanes, cost)
    found = simulate(packed, cost, lanes.pipeline, num_lanes=2)
    times = (found.forward_end - found.forward_start)[0]
    for tick, time in zip(ticks_of(packed.microbatches, 2), times, strict=True):
        rows = rows_of(tick, LIMITS, cost.buckets)
        assert time == pytest.approx(PASS(rows, 0) if any(tick) else 0)


def test_adds_no_bucket_that_is_not_allowed_or_does_not_help():
    given = samples()
    one, two, many = (
        choose(given, LIMITS, LANES, COST, candidates=CANDIDATES, max_buckets=n)
        for n in (1, 2, 9)
    )
    assert one.sizes == (4096,) and one.time == one.single_bucket_time
    assert len(two.sizes) == 2 and set(two.sizes) <= set(many.sizes)
    assert many.time <= two.time
    demanding = choose(given, LIMITS, LANES, COST, candidates=CANDIDATES, min_gain=0.99)
    assert demanding.sizes == (4096,)
    # No microbatch is larger than the capacity.
    larger = choose(given, LIMITS, LANES, COST, candidates=(8192,))
    assert larger.sizes == (4096,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": (100,)}, r"candidates \[100\] must be multiples of 64 tokens"),
        ({"candidates": (512,), "max_buckets": 0}, "max_buckets=0 must be positive"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        choose(samples(), LIMITS, LANES, COST, **options)


def test_refuses_a_sample_over_the_capacity():
    long = [Sample(owner=0, batch=0, index=0, num_tokens=5000)]
    with pytest.raises(ValueError, match="over the capacity of 4096 tokens"):
        choose(long, LIMITS, LANES, COST, candidates=CANDIDATES)

"""The choice of compiled shapes."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxlora.scheduler import AffineCost, CostModel, Limits, Pipeline, Sample, joint
from jaxlora.scheduler.buckets import choose
from jaxlora.scheduler.simulate import window_sum

LIMITS = Limits(capacity=4096, block_tokens=64)
PIPELINE = Pipeline.one_f_one_b(4)
PASS = AffineCost(base=64.0, per_token=1.0, per_square=0.0)
COST = CostModel.uniform(4, forward=PASS, backward=PASS)
CANDIDATES = (512, 1024, 2048, 3072)


def samples(num_jobs=1, num_batches=6, each=6, seed=0):
    """Small batches: a pipeline of one job runs many microbatches that are not full."""
    rng = np.random.default_rng(seed)
    return [
        Sample(job=j, batch=b, index=i, num_tokens=int(rng.integers(40, 700)))
        for j, b, i in itertools.product(
            range(num_jobs), range(num_batches), range(each)
        )
    ]


def test_as_good_as_any_pair():
    """Against all pairs with the capacity; the time is that of the plan in them."""
    asked = samples()

    def time_in(sizes):
        cost = dataclasses.replace(COST, buckets=sizes)
        return window_sum(joint.pack(asked, LIMITS, PIPELINE, cost), cost)

    chosen = choose(asked, LIMITS, PIPELINE, COST, candidates=CANDIDATES, most=2)
    assert chosen.time_of_one == time_in((4096,))
    assert chosen.time == min(time_in((c, 4096)) for c in CANDIDATES)
    assert chosen.time == time_in(chosen.sizes)
    assert chosen.time < 0.8 * chosen.time_of_one


def test_never_more_shapes_than_asked_for_or_than_help():
    asked = samples()
    one, two, many = (
        choose(asked, LIMITS, PIPELINE, COST, candidates=CANDIDATES, most=most)
        for most in (1, 2, 9)
    )
    assert one.sizes == (4096,) and one.time == one.time_of_one
    assert len(two.sizes) == 2 and set(two.sizes) <= set(many.sizes)
    assert many.time <= two.time
    proud = choose(
        asked, LIMITS, PIPELINE, COST, candidates=CANDIDATES, least_gain=0.99
    )
    assert proud.sizes == (4096,)
    # Larger than the capacity: no microbatch would ever be.
    larger = choose(asked, LIMITS, PIPELINE, COST, candidates=(8192,))
    assert larger.sizes == (4096,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": (100,)}, "multiples of 64 tokens, got 3 and \\[100\\]"),
        ({"candidates": (512,), "most": 0}, "must be positive"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        choose(samples(), LIMITS, PIPELINE, COST, **options)


def test_a_sample_over_the_capacity_is_refused():
    long = [Sample(job=0, batch=0, index=0, num_tokens=5000)]
    with pytest.raises(ValueError, match="over the capacity of 4096 tokens"):
        choose(long, LIMITS, PIPELINE, COST, candidates=CANDIDATES)

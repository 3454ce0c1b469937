"""Tests LoRAFusion's merge pass on inputs on which LoRAFusion's code fails."""

import dataclasses

import hypothesis
import hypothesis.strategies as st

from jaxlora.scheduler import Limits
from jaxlora.scheduler.papers import lorafusion
from jaxlora.scheduler.papers.lorafusion import merge
from jaxlora.scheduler.types import Pipeline
from tests.scheduler.strategies import LIMITS, mixes, sample

FOUR = Pipeline.one_f_one_b(4)
GREEDY = {"use_milp": False}


def test_a_merge_that_empties_a_microbatch_drops_it():
    """LoRAFusion's second merge pass keeps it, so its samples are trained on twice."""
    a, b = [sample(0, 0, 0, 100)], [sample(1, 0, i, 100) for i in range(2)]
    assert merge([[tuple(a)], [tuple(b)]], LIMITS, FOUR) == ((*a, *b),)


def test_a_merge_never_mixes_two_batches_of_a_job():
    """LoRAFusion does in its partial merge, which compares a name with itself."""
    samples = [sample(0, b, i, 60) for b in range(3) for i in range(3)]
    for distance in (1, 4):
        pipeline = Pipeline(distance=distance)
        schedule = lorafusion.pack(samples, LIMITS, pipeline, **GREEDY)
        assert [len(m) for m in schedule.microbatches if m] == [3, 3, 3]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(mixes(), st.integers(1, 16))
def test_a_merge_needs_no_additional_no_ops(samples, num_stages):
    """LoRAFusion's first merge pass does, and adds more no-ops than necessary."""
    pipeline = Pipeline.one_f_one_b(num_stages)
    plain, merged = (
        lorafusion.pack(samples, LIMITS, pipeline, use_merge=m, **GREEDY)
        for m in (False, True)
    )
    no_ops = lambda schedule: sum(not m for m in schedule.microbatches)
    assert no_ops(merged) <= no_ops(plain)
    assert len(merged.microbatches) <= len(plain.microbatches)


def test_a_merge_keeps_a_microbatch_that_separates_two_batches():
    """Without the only microbatch of job 1, the batches of job 0 would be too close."""
    first, second = sample(0, 0, 0, 100), sample(0, 1, 0, 100)
    between = (sample(1, 0, 0, 100), sample(1, 0, 1, 90))
    merged = merge([[(first,)], [between], [(second,)]], LIMITS, Pipeline(distance=2))
    assert merged == ((first, between[0]), (between[1],), (second,))


def test_a_merge_pads_to_the_given_block_size():
    """LoRAFusion always pads to the block size of its kernel, 128."""
    limits = Limits(capacity=160, block_tokens=32)
    a, b = sample(0, 0, 0, 96), sample(1, 0, 0, 64)
    assert merge([[(a,)], [(b,)]], limits, FOUR) == ((a, b),)
    coarse = dataclasses.replace(limits, capacity=128, block_tokens=128)
    assert len(merge([[(a,)], [(b,)]], coarse, FOUR)) == 2

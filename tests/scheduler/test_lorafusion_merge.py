"""LoRAFusion's merge, where its own code fails."""

import dataclasses

import hypothesis
import hypothesis.strategies as st

from jaxlora.scheduler import Limits, lorafusion
from jaxlora.scheduler.lorafusion.merge import merge
from jaxlora.scheduler.types import Pipeline
from tests.scheduler.strategies import LIMITS, mixes, sample

FOUR = Pipeline.one_f_one_b(4)
GREEDY = {"use_milp": False}


def test_a_merge_that_empties_a_microbatch_drops_it():
    """Its second merge pass keeps it, so that samples are trained twice."""
    a, b = [sample(0, 0, 0, 100)], [sample(1, 0, i, 100) for i in range(2)]
    assert merge([[tuple(a)], [tuple(b)]], LIMITS, FOUR) == ((*a, *b),)


def test_a_merge_never_mixes_two_batches_of_a_job():
    """Its partial merge does: the check for it compares a name with itself."""
    samples = [sample(0, b, i, 60) for b in range(3) for i in range(3)]
    for distance in (1, 4):
        pipeline = Pipeline(distance=distance)
        schedule = lorafusion.pack(samples, LIMITS, pipeline, **GREEDY)
        assert [len(m) for m in schedule.microbatches if m] == [3, 3, 3]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(mixes(), st.integers(1, 16))
def test_a_merge_calls_for_no_new_no_op(samples, num_stages):
    """Its first merge pass does, and repairs that with more no-ops than needed."""
    pipeline = Pipeline.one_f_one_b(num_stages)
    plain, merged = (
        lorafusion.pack(samples, LIMITS, pipeline, use_merge=m, **GREEDY)
        for m in (False, True)
    )
    no_ops = lambda schedule: sum(not m for m in schedule.microbatches)
    assert no_ops(merged) <= no_ops(plain)
    assert len(merged.microbatches) <= len(plain.microbatches)


def test_a_merge_looks_behind_the_microbatch_that_it_would_drop():
    """Dropping job 1's only microbatch would bring job 0's batches too close."""
    first, second = sample(0, 0, 0, 100), sample(0, 1, 0, 100)
    between = (sample(1, 0, 0, 100), sample(1, 0, 1, 90))
    merged = merge([[(first,)], [between], [(second,)]], LIMITS, Pipeline(distance=2))
    assert merged == ((first, between[0]), (between[1],), (second,))


def test_a_merge_pads_to_the_blocks_that_were_asked_for():
    """It pads to the kernel's, 128."""
    limits = Limits(capacity=160, block_tokens=32)
    a, b = sample(0, 0, 0, 96), sample(1, 0, 0, 64)
    assert merge([[(a,)], [(b,)]], limits, FOUR) == ((a, b),)
    coarse = dataclasses.replace(limits, capacity=128, block_tokens=128)
    assert len(merge([[(a,)], [(b,)]], coarse, FOUR)) == 2

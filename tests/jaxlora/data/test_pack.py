"""Tests splitting microbatches, for attention with room for few short samples."""

from hypothesis import given
from hypothesis import strategies as st

from jaxlora.data.pack import split_by_segment_limit
from jaxlora.scheduler import Sample

lengths_of = st.lists(st.integers(1, 40), max_size=60)


@given(lengths_of, st.integers(0, 40), st.integers(1, 10))
def test_parts_hold_few_short_samples_and_lose_none(lengths, short, most):
    microbatch = tuple(
        Sample(job=i // 7, batch=0, index=i, num_tokens=n)
        for i, n in enumerate(lengths)
    )
    parts = split_by_segment_limit(microbatch, short, most)
    assert tuple(s for part in parts for s in part) == microbatch
    num_short = [sum(s.num_tokens <= short for s in part) for part in parts]
    assert max(num_short) <= most
    # None is made before the last is full.
    assert all(n == most for n in num_short[:-1])

"""Tests packing: token indices, and splits for attention with few short samples."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxlora.data.pack import JobBatch, pack_microbatch, split_by_segment_limit
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.scheduler import Limits, Sample

lengths_of = st.lists(st.integers(1, 40), max_size=60)


@given(lengths_of, st.integers(0, 40), st.integers(1, 10))
def test_parts_hold_few_short_samples_and_lose_none(lengths, short, most):
    microbatch = tuple(
        Sample(owner=i // 7, batch=0, index=i, num_tokens=n)
        for i, n in enumerate(lengths)
    )
    parts = split_by_segment_limit(microbatch, short, most)
    assert tuple(s for part in parts for s in part) == microbatch
    num_short = [sum(s.num_tokens <= short for s in part) for part in parts]
    assert max(num_short) <= most
    # None is made before the last is full.
    assert all(n == most for n in num_short[:-1])


def test_token_indices_count_through_the_global_batch():
    """Dropout masks depend on them, so no two tokens of a batch share one."""
    lengths = (5, 3, 9, 4)
    tokens = [
        TokenizedSample(
            token_ids=np.arange(n, dtype=np.int32), is_target=np.ones(n, bool)
        )
        for n in lengths
    ]
    jobs = {
        slot: JobBatch(slot=slot, step=0, samples=tokens, weight=1.0) for slot in (0, 2)
    }
    samples = {slot: jobs[slot].to_schedule() for slot in jobs}
    limits = Limits(capacity=48, block_tokens=8)
    # A batch's samples lie in any order and in several microbatches, beside others.
    microbatches = [
        (samples[0][2], samples[0][0], samples[2][3]),
        (samples[0][3], samples[0][1], samples[2][0], samples[2][1], samples[2][2]),
    ]
    found: dict[int, list[int]] = {0: [], 2: []}
    for microbatch in microbatches:
        packed = pack_microbatch(microbatch, jobs, limits)
        for number, sample in enumerate(microbatch):
            rows = packed.segment_ids == number
            first = sum(lengths[: sample.index])
            expected = first + np.arange(sample.num_tokens)
            np.testing.assert_array_equal(packed.token_index[rows], expected)
            found[sample.owner] += packed.token_index[rows].tolist()
    assert all(sorted(seen) == list(range(sum(lengths))) for seen in found.values())


@given(
    groups=st.lists(
        st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=3
    ),
    absent=st.none() | st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_every_row_is_that_of_its_token(groups, absent, seed):
    """The definition, row by row: samples in order, each job on blocks of its own."""
    rng, limits = np.random.default_rng(seed), Limits(capacity=272, block_tokens=8)
    jobs = {
        slot: JobBatch(
            slot=slot,
            step=3,
            samples=[
                TokenizedSample(
                    token_ids=rng.integers(1, 99, n, np.int32),
                    is_target=rng.random(n) < 0.5,
                )
                for n in lengths
            ],
            weight=0.25,
        )
        for slot, lengths in enumerate(groups)
    }
    microbatch = tuple(s for job in jobs.values() for s in job.to_schedule())
    present = {slot: job for slot, job in jobs.items() if slot != absent}
    packed = pack_microbatch(microbatch, present, limits)
    names = "token_ids", "positions", "segment_ids", "labels", "token_index"
    wanted = {name: [-1 if name == "segment_ids" else 0] * 272 for name in names}
    slots, row, number = [-1] * (272 // 8), 0, 0
    for slot, job in jobs.items():
        row, index = -(-row // 8) * 8, 0
        for sample in job.samples:
            ids = sample.token_ids.tolist()
            for position, token in enumerate(ids):
                if slot != absent:
                    following = [*ids, 0][position + 1]
                    values = token, position, number, following, index
                    for name, value in zip(names, values, strict=True):
                        wanted[name][row] = value
                    slots[row // 8] = slot
                row, index = row + 1, index + 1
            number += 1
    for name in names:
        assert getattr(packed, name).tolist() == wanted[name], name
    assert packed.block_adapter.tolist() == slots

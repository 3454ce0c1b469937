import numpy as np
import pytest

from jaxlora.profile.tokens import fill, full_microbatch
from jaxlora.scheduler import Limits


@pytest.mark.parametrize("num_jobs", [1, 3, 8])
def test_a_full_microbatch_has_no_padding(num_jobs):
    limits = Limits(capacity=256, block_tokens=32)
    drawn = full_microbatch(num_jobs, limits, 50, median=15, longest=30, seed=0)
    assert drawn.num_tokens == 256
    assert (np.asarray(drawn.packed.segment_ids) >= 0).all()
    assert set(np.asarray(drawn.packed.block_adapter).tolist()) == set(range(num_jobs))
    assert all(len(s.token_ids) >= 2 and s.is_target.any() for s in drawn.samples)


@pytest.mark.parametrize("total", range(2, 40))
def test_lengths_fill_a_total_within_their_limit(total):
    """None of them is 1, as such a sample has no target."""
    for drawn in (1.0, 2.2, 6.0, 7.9, 100.0):
        lengths = fill(total, 8, lambda drawn=drawn: drawn)
        assert sum(lengths) == total and 2 <= min(lengths) <= max(lengths) <= 8

import numpy as np
import pytest

from jaxlora.bench.tokens import Lengths, full_microbatch
from jaxlora.scheduler import Limits


@pytest.mark.parametrize("num_jobs", [1, 3, 8])
def test_a_full_microbatch_has_no_padding(num_jobs):
    limits = Limits(capacity=256, block_tokens=32)
    lengths = Lengths(median=15, longest=30)
    drawn = full_microbatch(num_jobs, limits, lengths, 50, seed=0)
    assert drawn.num_tokens == 256
    assert (np.asarray(drawn.packed.segment_ids) >= 0).all()
    assert set(np.asarray(drawn.packed.block_adapter).tolist()) == set(range(num_jobs))
    assert all(len(s.token_ids) >= 2 and s.is_target.any() for s in drawn.samples)

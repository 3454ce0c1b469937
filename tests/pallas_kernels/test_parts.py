"""Sums over each adapter's own rows, in parts."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlora.pallas_kernels.mosaic.parts import add_parts, parts_of
from jaxlora.pallas_kernels.mosaic.routing import blocks_of

NUM_SLOTS = 5
owners = st.lists(st.integers(-1, NUM_SLOTS - 1), min_size=1, max_size=150)


def parts(owner, most):
    """Of blocks of 64 rows, and the blocks."""
    blocks = blocks_of(jnp.array(owner, jnp.int32), NUM_SLOTS, 64 * len(owner))
    return parts_of(blocks, most), blocks


@settings(max_examples=60, deadline=None)
@given(owner=owners, most=st.sampled_from([1, 2, 4, 16]))
def test_each_block_is_in_one_part_of_its_slot(owner, most):
    found, blocks = parts(owner, most)
    seen = []
    for i in range(int(found.items.total[0])):
        first, slot = int(found.items.begin[i]), int(found.items.slot[i])
        mine = blocks.order[first : first + int(found.items.count[i])].tolist()
        assert mine and all(owner[block] == slot for block in mine)
        assert found.first[slot] <= i < found.first[slot] + found.number[slot]
        seen += mine
    assert sorted(seen) == [i for i, slot in enumerate(owner) if slot >= 0]
    assert max(found.number.tolist()) <= most


@settings(max_examples=40, deadline=None)
@given(
    own=st.integers(1, 60),
    before=st.lists(st.integers(1, 4), max_size=80),
    after=st.lists(st.integers(1, 4), max_size=80),
)
def test_the_parts_of_a_slot_depend_on_its_own_rows_alone(own, before, after):
    def counts(owner):
        found, _ = parts(owner, 4)
        mine = np.asarray(found.items.slot)[: int(found.items.total[0])] == 0
        return np.asarray(found.items.count)[: len(mine)][mine].tolist()

    assert counts([*before, *[0] * own, *after]) == counts([0] * own)


@pytest.mark.parametrize("most", [1, 2, 3, 16])
def test_what_nobody_wrote_is_not_added(most):
    found, _ = parts([0] * 41 + [3] * 3, most)
    mine = min(most, 5)
    sums = np.full((found.items.slot.shape[0], 2), np.nan, np.float32)
    sums[: mine + 1] = np.random.default_rng(0).integers(1, 99, (mine + 1, 2))
    got = add_parts(jnp.array(sums), found, most)
    wanted = np.zeros((NUM_SLOTS, 2))
    wanted[0], wanted[3] = sums[:mine].sum(axis=0), sums[mine]
    np.testing.assert_array_equal(got, wanted)

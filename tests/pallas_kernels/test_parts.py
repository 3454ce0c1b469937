"""Each slot's rows are split into parts that depend on no other slot."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlora.pallas_kernels.parts import make_parts, sum_parts
from jaxlora.pallas_kernels.routing import make_blocks

NUM_SLOTS = 5
slots = st.lists(st.integers(-1, NUM_SLOTS - 1), min_size=1, max_size=150)


def parts_and_blocks(slot_of_block, max_parts):
    """Splits blocks of 64 rows; returns the parts and the blocks."""
    slot = jnp.array(slot_of_block, jnp.int32)
    blocks = make_blocks(slot, NUM_SLOTS, 64 * len(slot_of_block))
    return make_parts(blocks, max_parts), blocks


@settings(max_examples=60, deadline=None)
@given(slot_of_block=slots, max_parts=st.sampled_from([1, 2, 4, 16]))
def test_each_block_is_in_one_part_of_its_slot(slot_of_block, max_parts):
    parts, blocks = parts_and_blocks(slot_of_block, max_parts)
    table, seen = parts.table, []
    for i in range(int(table.num_parts[0])):
        first, slot = int(table.first_block[i]), int(table.slot[i])
        mine = blocks.order[first : first + int(table.num_blocks[i])].tolist()
        assert mine and all(slot_of_block[block] == slot for block in mine)
        first_part = int(parts.first_part[slot])
        assert first_part <= i < first_part + int(parts.num_parts[slot])
        seen += mine
    assert sorted(seen) == [i for i, slot in enumerate(slot_of_block) if slot >= 0]
    assert max(parts.num_parts.tolist()) <= max_parts


@settings(max_examples=40, deadline=None)
@given(
    own=st.integers(1, 60),
    before=st.lists(st.integers(1, 4), max_size=80),
    after=st.lists(st.integers(1, 4), max_size=80),
)
def test_the_parts_of_a_slot_depend_on_its_own_rows_alone(own, before, after):
    def sizes(slot_of_block):
        table = parts_and_blocks(slot_of_block, 4)[0].table
        mine = np.asarray(table.slot)[: int(table.num_parts[0])] == 0
        return np.asarray(table.num_blocks)[: len(mine)][mine].tolist()

    assert sizes([*before, *[0] * own, *after]) == sizes([0] * own)


@pytest.mark.parametrize("max_parts", [1, 2, 3, 16])
def test_parts_that_were_never_written_are_not_added(max_parts):
    parts, _ = parts_and_blocks([0] * 41 + [3] * 3, max_parts)
    num_parts = min(max_parts, 5)
    sums = np.full((parts.table.slot.shape[0], 2), np.nan, np.float32)
    written = (num_parts + 1, 2)
    sums[: num_parts + 1] = np.random.default_rng(0).integers(1, 99, written)
    got = sum_parts(jnp.array(sums), parts, max_parts)
    wanted = np.zeros((NUM_SLOTS, 2))
    wanted[0], wanted[3] = sums[:num_parts].sum(axis=0), sums[num_parts]
    np.testing.assert_array_equal(got, wanted)

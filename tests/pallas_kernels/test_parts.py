"""Each slot's rows are split into parts that depend on no other slot."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlora.pallas_kernels.operands import make_blocks
from jaxlora.pallas_kernels.parts import make_parts, sum_parts

NUM_SLOTS = 5
slot = st.integers(-1, NUM_SLOTS - 1)
runs = st.lists(st.tuples(slot, st.integers(1, 40)), min_size=1, max_size=6)
# Programs are compiled for each number of blocks, so there are few of them. Some are
# multiples of a part's blocks, and some are just below one.
LENGTHS = (7, 32, 79, 150, 240)


def length_for(num_blocks):
    return next(length for length in LENGTHS if length >= num_blocks)


def repeat(found):
    """Repeats a list until it has one of the lengths."""
    return [found[i % len(found)] for i in range(length_for(len(found)))]


slots = (
    st.lists(slot, min_size=1, max_size=150)
    | runs.map(lambda found: [slot for slot, count in found for _ in range(count)])
).map(repeat)


def parts_and_blocks(slot_of_block, max_parts, *, direct=False):
    """Splits blocks of 64 rows; returns the parts and the blocks."""
    slot = jnp.array(slot_of_block, jnp.int32)
    blocks = make_blocks(slot, NUM_SLOTS, 64 * len(slot_of_block))
    return make_parts(blocks, max_parts, direct=direct), blocks


@settings(max_examples=25, deadline=None)
@given(
    slot_of_block=slots,
    max_parts=st.sampled_from([1, 2, 4, 16]),
    direct=st.booleans(),
)
def test_each_block_is_in_one_part_of_its_slot(slot_of_block, max_parts, direct):
    parts, blocks = parts_and_blocks(slot_of_block, max_parts, direct=direct)
    table, seen, rows = parts.table, [], {}
    for i in range(int(table.num_parts[0])):
        first, slot = int(table.first_block[i]), int(table.slot[i])
        mine = blocks.order[first : first + int(table.num_blocks[i])].tolist()
        assert mine or (direct and slot not in slot_of_block)
        assert all(slot_of_block[block] == slot for block in mine)
        rows.setdefault(slot, []).append(int(table.row[i]))
        seen += mine
    assert sorted(seen) == [i for i, slot in enumerate(slot_of_block) if slot >= 0]
    assert set(rows) == set(range(NUM_SLOTS) if direct else slot_of_block) - {-1}
    assert max(map(len, rows.values()), default=0) <= max_parts
    _check_rows(parts, rows, direct)


def _check_rows(parts, rows, direct):
    """Checks where the parts of each slot are written, and that all are summed."""
    written = [row for mine in rows.values() for row in mine if row >= 0]
    assert sorted(set(written)) == sorted(written)
    assert all(row < parts.num_rows for row in written)
    slots = range(NUM_SLOTS) if not direct else parts.split_slots.tolist()
    assert len(set(slots)) == len(slots)
    firsts, counts = parts.first_row.tolist(), parts.num_parts.tolist()
    found = {
        slot: list(range(firsts[slot], firsts[slot] + counts[slot]))
        for slot in slots
        if slot < NUM_SLOTS and counts[slot]
    }
    split = {slot: mine for slot, mine in rows.items() if len(mine) > 1}
    assert found == (split if direct else rows)
    if direct:
        assert all(mine == [-1] for slot, mine in rows.items() if slot not in split)


@settings(max_examples=15, deadline=None)
@given(
    own=st.integers(1, 60),
    before=st.lists(st.integers(1, 4), max_size=80),
    after=st.lists(st.integers(1, 4), max_size=80),
)
def test_the_parts_of_a_slot_depend_on_its_own_rows_alone(own, before, after):
    def sizes(slot_of_block):
        padding = [-1] * (length_for(len(slot_of_block)) - len(slot_of_block))
        table = parts_and_blocks([*slot_of_block, *padding], 4)[0].table
        mine = np.asarray(table.slot)[: int(table.num_parts[0])] == 0
        return np.asarray(table.num_blocks)[: len(mine)][mine].tolist()

    assert sizes([*before, *[0] * own, *after]) == sizes([0] * own)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("max_parts", [1, 2, 3, 16])
def test_rows_that_were_never_written_are_not_added(max_parts, direct):
    parts, _ = parts_and_blocks([0] * 41 + [3] * 3, max_parts, direct=direct)
    table, rng = parts.table, np.random.default_rng(1)
    sums = np.full((parts.num_rows, 2), np.nan, np.float32)
    result = np.full((NUM_SLOTS, 2), np.nan, np.float32)
    wanted = np.zeros((NUM_SLOTS, 2))
    for i in range(int(table.num_parts[0])):
        one = rng.integers(1, 99, 2) * (int(table.num_blocks[i]) > 0)
        slot, row = int(table.slot[i]), int(table.row[i])
        (sums if row >= 0 else result)[row if row >= 0 else slot] = one
        wanted[slot] += one
    given = jnp.array(result) if direct else None
    got = sum_parts(jnp.array(sums), parts, given)
    np.testing.assert_array_equal(got, wanted)

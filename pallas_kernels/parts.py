"""Splits each slot's rows into parts, over which several multiprocessors can sum."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlora.pallas_kernels.dropout import TILE_TOKENS
from jaxlora.pallas_kernels.expert_rows import SMALL_BLOCK
from jaxlora.pallas_kernels.operands import Blocks

_MIN_PART_BLOCKS = 8  # a part of fewer blocks costs more to add up than it saves
_MIN_SPLIT_BLOCKS = 2 * _MIN_PART_BLOCKS  # of a slot with two parts
_EXPERT_PART_BLOCKS = 64  # of experts, whose slots are many
ROW_BITS, COLOR_BIT, BAD_BIT = 20, 26, 28  # of the numbers in `PartTable.rows`


@typing.no_type_check  # JAX also builds it from references
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartTable:
    """The parts of all slots in order of slot, as the outer kernel reads them.

    Attributes:
        slot: Slot of each part.
        first_block: Index in `Blocks.order` of each part's first block.
        num_blocks: Number of blocks of each part.
        row: Row of the partial sums that each part writes; -1: it is the only part of
            its slot and is written to the result.
        num_parts: Number of parts; the entries after them are unused.
        rows: If blocks are shared: the first row of each part, counted from its first
            block, the row after its last, the slot's color, and whether the sum's
            operands may not be finite in other rows of these blocks, as
            `bad << 28 | color << 26 | first << 20 | after`.
    """

    slot: Int[Array, " P"]
    first_block: Int[Array, " P"]
    num_blocks: Int[Array, " P"]
    row: Int[Array, " P"]
    num_parts: Int[Array, " 1"]
    rows: Int[Array, " P"] | None = None


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of all slots, and which partial sums have to be added up.

    The number of a slot's parts and their contents depend on its own rows alone. So
    the order of its sum does not depend on other slots.

    Attributes:
        table: The parts.
        max_parts: The most parts of a slot.
        usual_number: Number of parts if all slots have equally many rows.
        num_rows: Number of rows of the partial sums.
        first_row: Row of each slot's first part.
        num_parts: Number of each slot's parts.
        split_slots: If slots with one part need no addition: those with more, mixed
            with numbers from G on that stand for no slot. None: all slots are added up.
    """

    table: PartTable
    max_parts: int
    usual_number: int
    num_rows: int
    first_row: Int[Array, " G"]
    num_parts: Int[Array, " G"]
    split_slots: Int[Array, " M"] | None


def max_split_slots(num_blocks: int) -> int:
    """Returns how many slots can have more than one part."""
    return num_blocks // _MIN_SPLIT_BLOCKS


def make_parts(blocks: Blocks, max_parts: int, *, direct: bool = False) -> Parts:
    """Splits each slot's rows into at most `max_parts` parts.

    Args:
        blocks: Slots of the rows.
        max_parts: The most parts of a slot.
        direct: Whether the only part of a slot is written to the result at once. Then
            a slot without rows has an empty part, so that its result is written too.
    """
    # Shared blocks are divided between groups of 16 rows, as in blocks of their own.
    groups, starts, num_blocks = 1, blocks.starts, blocks.slot.shape[0]
    if (shared := blocks.shared) is not None:
        groups, starts = TILE_TOKENS // SMALL_BLOCK, shared.small_starts
    start, own = starts[:-1], starts[1:] - starts[:-1]
    least_blocks = _MIN_PART_BLOCKS if blocks.num_tiles is None else _EXPERT_PART_BLOCKS
    least = least_blocks * groups
    num_parts = jnp.clip(own // least, 1, max_parts)
    num_parts = num_parts if direct else jnp.where(own > 0, num_parts, 0)
    end = jnp.cumsum(num_parts, dtype=jnp.int32)
    first = end - num_parts
    num_slots = own.shape[0]
    room = min(max_parts * num_slots, num_slots + num_blocks // least_blocks)
    index = jnp.arange(room, dtype=jnp.int32)
    slot = (end <= index[:, None]).sum(axis=1, dtype=jnp.int32)
    slot = jnp.minimum(slot, num_slots - 1)
    part = index - first[slot]
    divisor = jnp.maximum(num_parts[slot], 1)
    begin, after = (own[slot] * n // divisor for n in (part, part + 1))
    equal = max(num_blocks // num_slots // least_blocks, 1)
    row, first_row, num_rows, split_slots = index, first, room, None
    if direct:
        # A slot with n parts has n times the least blocks, so its rows are its own.
        first_row = start // least
        row = jnp.where(num_parts[slot] > 1, first_row[slot] + part, -1)
        num_rows = max(num_blocks // least_blocks, 1)
        split_slots = _split_slots(
            starts, num_parts > 1, num_blocks * groups, 2 * least
        )
    table = PartTable(slot, start[slot] + begin, after - begin, row, end[-1:])
    if shared is not None:
        of_slot = shared.first[slot]
        begin, after = of_slot + begin, of_slot + after
        block = begin // groups
        entry = blocks.starts[slot] + block - of_slot // groups
        number = jnp.where(after > begin, -(-after // groups) - block, 0)
        rows = [(one - block * groups) * SMALL_BLOCK for one in (begin, after)]
        packed = shared.color[slot] << COLOR_BIT | rows[0] << ROW_BITS | rows[1]
        table = dataclasses.replace(
            table, first_block=entry, num_blocks=number, rows=packed
        )
    return Parts(
        table=table,
        max_parts=max_parts,
        usual_number=num_slots * min(equal, max_parts),
        num_rows=num_rows,
        first_row=first_row,
        num_parts=num_parts,
        split_slots=split_slots,
    )


def _split_slots(starts, is_split: Bool[Array, " G"], num_blocks: int, least: int):
    """Returns the slots with more than one part among numbers from G on, all different.

    Such a slot has the least number of blocks or more, so it has the block in
    `Blocks.order` at a multiple of it. It is found at the first of these.
    """
    (num_slots,) = is_split.shape
    number = jnp.arange(-(-num_blocks // least), dtype=jnp.int32)
    place = number * least
    slot = (starts[1:] <= place[:, None]).sum(axis=1, dtype=jnp.int32)
    inside = jnp.minimum(slot, num_slots - 1)
    is_first = starts[inside] > place - least
    is_found = (slot < num_slots) & is_split[inside] & is_first
    return jnp.where(is_found, slot, num_slots + number)


def sum_parts(
    sums: Float[Array, "P ..."],
    parts: Parts,
    result: Float[Array, "G ..."] | None = None,
) -> Float[Array, "G ..."]:
    """Adds up the parts of each slot as a binary tree.

    One gather and few additions serve all slots, because the compile time grows with
    the number of operations.

    Args:
        sums: The sum over each part; rows without a part may hold anything.
        parts: The parts.
        result: The sums of slots with one part, if the parts are direct. The sums of
            the other slots are put in their places.
    """
    first, num_parts = parts.first_row, parts.num_parts
    if parts.split_slots is not None:
        chosen = jnp.minimum(parts.split_slots, num_parts.shape[0] - 1)
        is_slot = parts.split_slots == chosen
        first, num_parts = first[chosen], jnp.where(is_slot, num_parts[chosen], 0)
    room = 1 << (parts.max_parts - 1).bit_length()
    index = jnp.arange(room, dtype=jnp.int32)[:, None]
    is_part = index < num_parts
    source = jnp.where(is_part, first + index, 0)
    # Without the barrier, XLA would compute both again in every gather of the kernel
    # that adds up the gradients of many layers, and LLVM would take seconds for each.
    is_part, source = jax.lax.optimization_barrier((is_part, source))
    total = sums.at[source].get(mode="promise_in_bounds")
    # Rows that were never written may hold anything, so they must be selected away.
    total = jnp.where(is_part.reshape(room, -1, *(1,) * (sums.ndim - 1)), total, 0)
    while total.shape[0] > 1:
        pairs = total.reshape(-1, 2, *total.shape[1:])
        total = pairs[:, 0] + pairs[:, 1]
    if result is None:
        return total[0]
    put = result.at[parts.split_slots]
    return put.set(total[0], mode="drop", unique_indices=True)

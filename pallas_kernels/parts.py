"""Splits each slot's rows into parts, over which several multiprocessors can sum."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.routing import Blocks

_MIN_PART_BLOCKS = 8  # a part of fewer blocks costs more to add up than it saves


@typing.no_type_check  # JAX also builds it from references
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartTable:
    """The parts of all slots in order of slot, as the outer kernel reads them.

    Attributes:
        slot: Slot of each part.
        first_block: Index in `Blocks.order` of each part's first block.
        num_blocks: Number of blocks of each part.
        num_parts: Number of parts; the entries after them are unused.
    """

    slot: Int[Array, " P"]
    first_block: Int[Array, " P"]
    num_blocks: Int[Array, " P"]
    num_parts: Int[Array, " 1"]


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of all slots, and where each slot's parts are.

    The number of a slot's parts and their contents depend on its own rows alone. So
    the order of its sum does not depend on other slots.

    Attributes:
        table: The parts.
        first_part: Index of each slot's first part.
        num_parts: Number of each slot's parts.
    """

    table: PartTable
    first_part: Int[Array, " G"]
    num_parts: Int[Array, " G"]


def make_parts(blocks: Blocks, max_parts: int) -> Parts:
    """Splits each slot's rows into at most `max_parts` parts."""
    starts, num_blocks = blocks.starts, blocks.slot.shape[0]
    start, own = starts[:-1], starts[1:] - starts[:-1]
    num_parts = jnp.clip(own // _MIN_PART_BLOCKS, 1, max_parts)
    num_parts = jnp.where(own > 0, num_parts, 0)
    end = jnp.cumsum(num_parts, dtype=jnp.int32)
    first = end - num_parts
    num_slots = own.shape[0]
    room = min(max_parts * num_slots, num_slots + num_blocks // _MIN_PART_BLOCKS)
    index = jnp.arange(room, dtype=jnp.int32)
    slot = (end <= index[:, None]).sum(axis=1, dtype=jnp.int32)
    slot = jnp.minimum(slot, num_slots - 1)
    part = index - first[slot]
    divisor = jnp.maximum(num_parts[slot], 1)
    begin, after = (own[slot] * n // divisor for n in (part, part + 1))
    table = PartTable(slot, start[slot] + begin, after - begin, end[-1:])
    return Parts(table, first, num_parts)


def sum_parts(
    sums: Float[Array, "P ..."], parts: Parts, max_parts: int
) -> Float[Array, "G ..."]:
    """Adds up each slot's parts as a binary tree.

    One gather and few additions serve all slots, because the compile time grows with
    the number of operations.
    """
    room = 1 << (max_parts - 1).bit_length()
    index = jnp.arange(room, dtype=jnp.int32)[:, None]
    is_part = index < parts.num_parts
    source = jnp.where(is_part, parts.first_part + index, 0)
    total = sums.at[source].get(mode="promise_in_bounds")
    # Rows that were never written may hold anything, so they must be selected away.
    total = jnp.where(is_part.reshape(room, -1, *(1,) * (sums.ndim - 1)), total, 0)
    while total.shape[0] > 1:
        pairs = total.reshape(-1, 2, *total.shape[1:])
        total = pairs[:, 0] + pairs[:, 1]
    return total[0]

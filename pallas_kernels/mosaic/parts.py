"""Sums over each adapter's own rows, in parts that many multiprocessors can share."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.mosaic.routing import Blocks

_PART_BLOCKS = 8  # a part of fewer blocks costs more to add up than it saves


@typing.no_type_check  # JAX rebuilds it around references
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartItems:
    """The parts of all slots as the kernel reads them, one slot's after the other's.

    Attributes:
        slot: Slot of each part, P.
        begin: Where its blocks start in `Blocks.order`, P.
        count: How many blocks it has, P.
        total: How many parts there are, 1; entries behind them are unused.
    """

    slot: Int[Array, " P"]
    begin: Int[Array, " P"]
    count: Int[Array, " P"]
    total: Int[Array, " 1"]


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of all slots, and how to add them up.

    How many parts a slot has, and what is in them, depends on its own rows alone, so
    that the order of a sum does not depend on neighbours.

    Attributes:
        items: The parts.
        first: Where each slot's parts start, G.
        number: How many parts each slot has, G.
    """

    items: PartItems
    first: Int[Array, " G"]
    number: Int[Array, " G"]


def parts_of(blocks: Blocks, most: int) -> Parts:
    """Splits each slot's rows into at most so many parts."""
    starts, num_blocks = blocks.starts, blocks.slot.shape[0]
    start, own = starts[:-1], starts[1:] - starts[:-1]
    number = jnp.where(own > 0, jnp.clip(own // _PART_BLOCKS, 1, most), 0)
    end = jnp.cumsum(number, dtype=jnp.int32)
    first = end - number
    num_slots = own.shape[0]
    room = min(most * num_slots, num_slots + num_blocks // _PART_BLOCKS)
    index = jnp.arange(room, dtype=jnp.int32)
    slot = (end <= index[:, None]).sum(axis=1, dtype=jnp.int32)
    slot = jnp.minimum(slot, num_slots - 1)
    part = index - first[slot]
    pieces = jnp.maximum(number[slot], 1)
    begin, after = (own[slot] * n // pieces for n in (part, part + 1))
    items = PartItems(slot, start[slot] + begin, after - begin, end[-1:])
    return Parts(items, first, number)


def add_parts(
    sums: Float[Array, "P ..."], parts: Parts, most: int
) -> Float[Array, "G ..."]:
    """The sum of each slot's parts, each with its neighbour, then pairs with pairs.

    In few steps, and with one gather for all: the compiler's time goes by their number.
    """
    room = 1 << (most - 1).bit_length()
    index = jnp.arange(room, dtype=jnp.int32)[:, None]
    is_part = index < parts.number
    place = jnp.where(is_part, parts.first + index, 0)
    total = sums.at[place].get(mode="promise_in_bounds")
    # Select, because rows that were never written may hold anything.
    total = jnp.where(is_part.reshape(room, -1, *(1,) * (sums.ndim - 1)), total, 0)
    while total.shape[0] > 1:
        pairs = total.reshape(-1, 2, *total.shape[1:])
        total = pairs[:, 0] + pairs[:, 1]
    return total[0]

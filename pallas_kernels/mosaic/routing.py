"""Token blocks as the kernels read them, worked out once for all layers."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxlora.pallas_kernels.mosaic.ring import ROWS


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Token rows in blocks of 64.

    Attributes:
        slot: Slot of each block, -1 for padding.
        order: Blocks sorted by slot, padding last.
        starts: Where each slot's blocks start in `order`, G + 1.
    """

    slot: Int[Array, " NB"]
    order: Int[Array, " NB"]
    starts: Int[Array, " G1"]


def blocks_of(
    block_adapter: Int[Array, " NB"], num_slots: int, num_rows: int
) -> Blocks:
    """Splits the token blocks into blocks of 64 rows and sorts them by slot.

    The order comes from counting, not from a sort: a few comparisons of NB x NB.
    """
    slot = jnp.repeat(block_adapter, num_rows // ROWS // block_adapter.shape[0])
    key = jnp.where(slot < 0, num_slots, slot)
    index = jnp.arange(slot.shape[0], dtype=jnp.int32)
    before = (key[None] < key[:, None]) | (
        (key[None] == key[:, None]) & (index[None] < index[:, None])
    )
    place = before.sum(axis=1, dtype=jnp.int32)
    order = jnp.where(place[None] == index[:, None], index[None], 0).sum(
        axis=1, dtype=jnp.int32
    )
    bound = jnp.arange(num_slots + 1, dtype=jnp.int32)
    starts = (key[None] < bound[:, None]).sum(axis=1, dtype=jnp.int32)
    return Blocks(slot, order, starts)

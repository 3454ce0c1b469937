"""The slots of token rows in blocks of 64, as the kernels read them."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxlora.pallas_kernels.dropout import TILE_TOKENS


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of 64 token rows, each with one slot.

    Attributes:
        slot: Slot of each block; -1 for padding.
        order: Blocks sorted by slot, with padding last.
        starts: Index in `order` of each slot's first block, and of the padding's.
    """

    slot: Int[Array, " NB"]
    order: Int[Array, " NB"]
    starts: Int[Array, " G1"]


def make_blocks(
    block_adapter: Int[Array, " NB"], num_slots: int, num_rows: int
) -> Blocks:
    """Splits token blocks into blocks of 64 rows and sorts them by slot.

    The order is found by counting NB x NB comparisons. XLA compiles these into one
    small kernel, whereas a sort takes several.

    Args:
        block_adapter: Slot of each token block; -1 for padding.
        num_slots: G.
        num_rows: T, a multiple of 64 NB.
    """
    slot = jnp.repeat(block_adapter, num_rows // TILE_TOKENS // block_adapter.shape[0])
    key = jnp.where(slot < 0, num_slots, slot)
    index = jnp.arange(slot.shape[0], dtype=jnp.int32)
    is_before = (key[None] < key[:, None]) | (
        (key[None] == key[:, None]) & (index[None] < index[:, None])
    )
    rank = is_before.sum(axis=1, dtype=jnp.int32)
    order = jnp.where(rank[None] == index[:, None], index[None], 0).sum(
        axis=1, dtype=jnp.int32
    )
    bound = jnp.arange(num_slots + 1, dtype=jnp.int32)
    starts = (key[None] < bound[:, None]).sum(axis=1, dtype=jnp.int32)
    return Blocks(slot, order, starts)

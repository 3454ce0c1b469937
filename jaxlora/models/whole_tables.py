"""Whole copies of the embedding and of the head that slots train.

A copy takes the place of the frozen module for its slot, as PEFT's `modules_to_save`
does: each of the two is copied by itself, also where the frozen ones are tied.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlora.modules.base_param import SlotVariable
from jaxlora.modules.whole_head import WholeHeads


class WholeTables(nnx.Module):
    """The copy of each slot, stored V D.

    Attributes:
        table: The copies, float32; zero in slots that have none.
        is_trained: Whether the slot has one.
    """

    def __init__(self, num_slots: int, vocab_size: int, features: int):
        """Makes slots without copies.

        Args:
            num_slots: Number of slots G.
            vocab_size: Number of tokens V.
            features: Size of a row D.
        """
        self.table = nnx.LoRAParam(jnp.zeros((num_slots, vocab_size, features)))
        self.is_trained = SlotVariable(jnp.zeros(num_slots, jnp.bool_))

    def block_slots(self, block_adapter: Int[Array, " NB"]) -> Int[Array, " NB"]:
        """Returns the slot of each block if it has a copy, otherwise -1."""
        is_trained = self.is_trained[...][jnp.maximum(block_adapter, 0)]
        return jnp.where((block_adapter >= 0) & is_trained, block_adapter, -1)

    def looked_up(
        self,
        h: Float[Array, "T D"],
        token_ids: Int[Array, " T"],
        block_adapter: Int[Array, " NB"],
    ) -> Float[Array, "T D"]:
        """Returns the rows of tokens by the copies, where the slot has one.

        Args:
            h: Rows of the frozen embedding.
            token_ids: The tokens.
            block_adapter: Slot of each block of tokens; -1: none.
        """
        table, slots = self.table[...], self.block_slots(block_adapter)
        own = _own_rows(table, token_ids, slots, table.shape[:2])
        is_own = jnp.repeat(slots >= 0, len(token_ids) // len(slots))
        return jnp.where(is_own[:, None], own.astype(h.dtype), h)

    def of_head(self, block_adapter: Int[Array, " NB"]) -> WholeHeads:
        """Returns the copies as those of the head.

        Args:
            block_adapter: Slot of each block of rows; -1: none.
        """
        return WholeHeads(self.table[...], self.block_slots(block_adapter))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _own_rows(table, token_ids, block_slots, size: tuple[int, int]):
    """Returns `table[slot, token]`; anything where the slot is -1.

    Its gradient adds what a block has for each token, block by block. So slots do not
    reach each other, the order of a sum is always the same, and no place is written
    twice at once, for which a GPU would need atomics.

    Args:
        table: G V D.
        token_ids: The tokens, T.
        block_slots: Slot of each block of them, NB; -1: none.
        size: G and V.
    """
    slots = jnp.repeat(jnp.maximum(block_slots, 0), len(token_ids) // len(block_slots))
    return table[slots, token_ids]


def _forward(table, token_ids, block_slots, size):
    return _own_rows(table, token_ids, block_slots, size), (token_ids, block_slots)


def _backward(size, kept, drows):
    token_ids, block_slots = kept
    (num_slots, vocab_size), num_blocks = size, len(block_slots)
    ids = token_ids.reshape(num_blocks, -1)
    block_tokens = ids.shape[1]
    is_same = ids[:, :, None] == ids[:, None, :]
    sums = jnp.einsum(
        "bij,bjd->bid",
        is_same.astype(jnp.float32),
        drows.reshape(num_blocks, block_tokens, -1).astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    # The first of equal tokens takes their sum; the others have no place.
    numbers = jnp.arange(block_tokens)
    is_first = is_same.argmax(axis=2) == numbers
    is_used = is_first & (block_slots >= 0)[:, None]
    places = jnp.where(is_used, ids, vocab_size + numbers)

    def add(gradient, block):
        slot, place, own = block
        place = gradient.at[slot, place]
        return place.add(own, mode="drop", unique_indices=True), None

    zeros = jnp.zeros((num_slots, vocab_size, drows.shape[1]), jnp.float32)
    blocks = jnp.maximum(block_slots, 0), places, sums
    gradient, _ = jax.lax.scan(add, zeros, blocks)
    return gradient.astype(drows.dtype), None, None


_own_rows.defvjp(_forward, _backward)

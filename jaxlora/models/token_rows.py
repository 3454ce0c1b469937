"""Rows of the embedding and of the head that a slot trains, such as of added tokens.

They replace the frozen rows for the slot's own tokens, as PEFT's
`trainable_token_indices` does. A head that is tied to the embedding has the rows of the
embedding; another has rows of its own.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlora.modules.base_param import SlotVariable
from jaxlora.modules.loss import HeadRows


class TokenRows(nnx.Module):
    """The rows of each slot.

    Attributes:
        rows: The rows, float32; those that a slot does not have are zero.
        ids: The token of each row; -1: the slot does not have it.
    """

    def __init__(self, num_slots: int, num_rows: int, features: int):
        """Makes slots without rows.

        Args:
            num_slots: Number of slots G.
            num_rows: Largest number of rows of a slot E.
            features: Size of a row D.
        """
        self.rows = nnx.LoRAParam(jnp.zeros((num_slots, num_rows, features)))
        self.ids = SlotVariable(jnp.full((num_slots, num_rows), -1, jnp.int32))

    def looked_up(
        self,
        h: Float[Array, "T D"],
        token_ids: Int[Array, " T"],
        block_adapter: Int[Array, " NB"],
    ) -> Float[Array, "T D"]:
        """Returns the rows of tokens, given those that the embedding has looked up.

        Rows are selected, and gradients are summed by block and then by slot, so slots
        do not reach each other, and the order of a sum is always the same.

        Args:
            h: Rows of the embedding.
            token_ids: The tokens.
            block_adapter: Slot of each block of tokens; -1: none.
        """
        table, num_blocks = self.rows[...], len(block_adapter)
        mine = block_adapter == jnp.arange(len(table))[:, None]
        own = jnp.where(mine[:, :, None, None], table[:, None], 0.0).sum(axis=0)
        ids = jnp.where(mine[:, :, None], self.ids[...][:, None] + 1, 0).sum(axis=0) - 1
        is_own = token_ids.reshape(num_blocks, -1)[:, :, None] == ids[:, None]
        found = jnp.einsum(
            "bte,bed->btd",
            is_own.astype(jnp.float32),
            own,
            precision=jax.lax.Precision.HIGHEST,
        )
        replaces = is_own.any(axis=2).reshape(-1)[:, None]
        return jnp.where(replaces, found.reshape(h.shape).astype(h.dtype), h)

    def of_head(self, block_adapter: Int[Array, " NB"]) -> HeadRows:
        """Returns the rows as those of the head.

        Args:
            block_adapter: Slot of each block of rows; -1: none.
        """
        return HeadRows(self.rows[...], self.ids[...], block_adapter)

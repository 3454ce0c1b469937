"""The score head of each slot: a trained vector, for objectives of scalar rewards."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlora.sharding.tensor import trained_once


class ScoreHead(nnx.Module):
    """The product of hidden states with a vector of their slot, in float32."""

    def __init__(self, num_slots: int, features: int, *, tensor: int = 1):
        """Makes heads of zeros.

        Args:
            num_slots: Number of slots.
            features: Size of the hidden states.
            tensor: Number of devices that compute the same scores; see
                `jaxlora.sharding.tensor`.
        """
        self.tensor = tensor
        self.weight = nnx.LoRAParam(jnp.zeros((num_slots, features), jnp.float32))

    def __call__(
        self, hidden: Float[Array, "T D"], block_adapter: Int[Array, " NB"]
    ) -> Float[Array, " T"]:
        """Returns the score of each row; 0 in blocks without a slot.

        Heads are selected, and never multiplied by 0: a slot that has diverged changes
        neither the scores of other slots nor their gradients. Gradients are summed by
        block and then by slot, always in the same order.

        Args:
            hidden: Hidden states after the final norm; rows whose score is not wanted
                should be 0.
            block_adapter: Slot of each block of rows; -1: none.
        """
        table = trained_once(self.weight[...], self.tensor)
        mine = block_adapter == jnp.arange(len(table))[:, None]
        heads = jnp.where(mine[:, :, None], table[:, None, :], 0.0).sum(axis=0)
        rows = hidden.reshape(len(block_adapter), -1, hidden.shape[1])
        return (rows.astype(jnp.float32) * heads[:, None, :]).sum(axis=-1).ravel()

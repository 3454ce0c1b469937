"""The bias of a linear that slots train, beside LoRA (PEFT's `bias: lora_only`)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def with_trained_bias(
    y: Float[Array, "T N"],
    frozen: Float[Array, " N"],
    table: Float[Array, "G N"],
    is_used: Bool[Array, " G"],
    block_adapter: Int[Array, " NB"],
) -> Float[Array, "T N"]:
    """Returns the output of a linear with the bias of each block's slot.

    Biases are selected, and gradients are summed by block and then by slot, so slots do
    not reach each other, and the order of a sum is always the same.

    Args:
        y: The output with the frozen bias.
        frozen: The frozen bias.
        table: Biases of the slots, float32.
        is_used: Whether the slot trains the bias.
        block_adapter: Slot of each block of rows; -1: none.
    """
    mine = (block_adapter == jnp.arange(len(table))[:, None]) & is_used[:, None]
    own = jnp.where(mine[:, :, None], table[:, None], 0.0).sum(axis=0)
    replaces = mine.any(axis=0)[:, None, None]
    blocks = y.reshape(len(block_adapter), -1, y.shape[1]).astype(jnp.float32)
    changed = blocks - frozen.astype(jnp.float32) + own[:, None]
    return jnp.where(replaces, changed, blocks).astype(y.dtype).reshape(y.shape)

"""The definition of the multi-adapter LoRA linear: float32, slow and simple."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.dropout import Dropout
from jaxlora.pallas_kernels.given_mask import GivenMask


def multi_lora_linear_reference(
    x: Float[Array, "T K"],
    w: Float[Array, "K N"],
    a: Float[Array, "G K R"],
    b: Float[Array, "G R N"],
    scaling: Float[Array, " G"],
    block_adapter: Int[Array, " NB"],
    bias: Float[Array, " N"] | None = None,
    dropout: Dropout | GivenMask | None = None,
) -> Float[Array, "T N"]:
    """Computes `multi_lora_linear` one token block at a time; an oracle for tests."""
    x, w, a, b = (z.astype(jnp.float32) for z in (x, w, a, b))
    block_t = x.shape[0] // block_adapter.shape[0]
    base = x @ w + (0 if bias is None else bias.astype(jnp.float32))
    slot = jnp.maximum(block_adapter, 0)
    mask = None if dropout is None else dropout.keep(slot, x.shape)
    out = []
    for i, g in enumerate(block_adapter.tolist()):
        rows = slice(i * block_t, (i + 1) * block_t)
        if g < 0:  # padding
            out.append(jnp.zeros_like(base[rows]))
            continue
        kept = x[rows]
        if dropout is not None and mask is not None:
            kept = jnp.where(mask[i], kept, 0) * dropout.inverse_keep[g]
        out.append(base[rows] + scaling[g] * (kept @ a[g]) @ b[g])
    return jnp.concatenate(out)

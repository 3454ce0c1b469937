"""The multi-adapter LoRA linear in plain XLA: right on every device, fast on none.

Each token block gathers its own adapter, so nothing of one adapter, not even a NaN,
meets the rows of another.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dropout import Dropout, inverse_keep, keep_mask


def _einsum(spec: str, *operands: Array) -> Array:
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)


def _keep(dropout: Dropout, slot_B: Array, num_features: int) -> Bool[Array, "B T K"]:
    token_index = dropout.token_index.reshape(slot_B.shape[0], -1)
    return keep_mask(
        dropout.key[slot_B], dropout.rate[slot_B], token_index, num_features
    )


def _factor(scaling: Array, dropout: Dropout | None, slot_B: Array) -> Array:
    if dropout is not None:
        scaling = scaling * inverse_keep(dropout.rate)
    return scaling[slot_B][:, None, None]


def forward(
    x: Float[Array, "T K"],
    w: Float[Array, "L _ _"],
    layer: Int[Array, " 1"],
    a: Float[Array, "G K R"],
    b: Float[Array, "G R N"],
    scaling: Float[Array, " G"],
    rank: Int[Array, " G"],
    block_adapter: Int[Array, " NB"],
    bias: Float[Array, " N"] | None,
    dropout: Dropout | None,
    *,
    w_transposed: bool = False,
) -> tuple[Float[Array, "T N"], Float[Array, "NB BT R"]]:
    """Returns y, and s = scaling * dropout(x) A for the backward pass."""
    del rank  # columns beyond it are zero
    num_blocks = block_adapter.shape[0]
    slot_B = jnp.maximum(block_adapter, 0)
    x_B = x.reshape(num_blocks, -1, x.shape[1])
    if dropout is not None:
        x_B = jnp.where(_keep(dropout, slot_B, x.shape[1]), x_B, 0)
    s = _einsum("btk,bkr->btr", x_B, a.astype(x.dtype)[slot_B])
    s = (s * _factor(scaling, dropout, slot_B)).astype(x.dtype)
    delta = _einsum("btr,brn->btn", s, b.astype(x.dtype)[slot_B])
    spec = "tk,nk->tn" if w_transposed else "tk,kn->tn"
    y = _einsum(spec, x, w[layer[0]]).reshape(delta.shape) + delta
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    # A block of nobody computed with slot 0, which may hold anything: select it away.
    y = jnp.where(block_adapter[:, None, None] >= 0, y, 0)
    return y.reshape(x.shape[0], -1).astype(x.dtype), s


def _sum_by_adapter(
    blocks: Float[Array, "NB P Q"], block_adapter: Int[Array, " NB"], num_slots: int
) -> Float[Array, "G P Q"]:
    """Sums each adapter's blocks, in block order; without atomics, without 0 * NaN."""
    mine = block_adapter == jnp.arange(num_slots)[:, None]
    return jnp.where(mine[:, :, None, None], blocks, 0).sum(axis=1)


def backward(
    dy: Float[Array, "T N"],
    x: Float[Array, "T K"],
    w: Float[Array, "L _ _"],
    layer: Int[Array, " 1"],
    s: Float[Array, "NB BT R"],
    a: Float[Array, "G K R"],
    b: Float[Array, "G R N"],
    scaling: Float[Array, " G"],
    rank: Int[Array, " G"],
    block_adapter: Int[Array, " NB"],
    dropout: Dropout | None,
    *,
    w_transposed: bool = False,
) -> tuple[Float[Array, "T K"], Float[Array, "G K R"], Float[Array, "G R N"]]:
    """Returns dx in x's dtype, and da, db in float32."""
    del rank
    num_slots, num_blocks = a.shape[0], block_adapter.shape[0]
    slot_B = jnp.maximum(block_adapter, 0)
    x_B = x.reshape(num_blocks, -1, x.shape[1])
    dy_B = dy.reshape(num_blocks, -1, dy.shape[1])
    keep = None if dropout is None else _keep(dropout, slot_B, x.shape[1])

    ds = _einsum("btn,brn->btr", dy_B, b.astype(x.dtype)[slot_B])
    ds = (ds * _factor(scaling, dropout, slot_B)).astype(x.dtype)
    db = _sum_by_adapter(_einsum("btr,btn->brn", s, dy_B), block_adapter, num_slots)
    kept_B = x_B if keep is None else jnp.where(keep, x_B, 0)
    da = _sum_by_adapter(_einsum("btk,btr->bkr", kept_B, ds), block_adapter, num_slots)

    through = _einsum("btr,bkr->btk", ds, a.astype(x.dtype)[slot_B])
    if keep is not None:
        through = jnp.where(keep, through, 0)
    spec = "tn,nk->tk" if w_transposed else "tn,kn->tk"
    dx = _einsum(spec, dy, w[layer[0]]).reshape(through.shape) + through
    dx = jnp.where(block_adapter[:, None, None] >= 0, dx, 0)
    return dx.reshape(x.shape).astype(x.dtype), da, db

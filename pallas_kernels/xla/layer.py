"""The multi-adapter LoRA linear in plain JAX, for any device.

Each token block gathers its own adapter. So no value of one adapter, not even a NaN,
reaches the rows of another. The masks and the float32 terms are stored in device
memory, which makes this slower than fused kernels.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.dropout import Dropout
from jaxlora.pallas_kernels.given_mask import GivenMask
from jaxlora.pallas_kernels.projection import LinearShape, Projection
from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.xla import fp8


def unsupported(shape: LinearShape) -> str | None:
    """Returns why these kernels cannot run such a linear, or None if they can."""
    if shape.extra:
        return f"its kernels train A and B only, not {', '.join(shape.extra)}"
    return None


def _fp8_weights(projections: tuple[Projection, ...]) -> list[Fp8Weight]:
    return [p.w for p in projections if isinstance(p.w, Fp8Weight)]


def _einsum(spec: str, *operands: Array) -> Array:
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)


def _factor(
    scaling: Array, dropout: Dropout | GivenMask | None, slot_B: Array
) -> Array:
    if dropout is not None:
        scaling = scaling * dropout.inverse_keep
    return scaling[slot_B][:, None, None]


def forward(
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    layer: Int[Array, " 1"],
    block_adapter: Int[Array, " NB"],
    *,
    w_transposed: bool = False,
) -> tuple[list[Array], list[Array]]:
    """Computes y [T, N] and s = scaling dropout(x) A [NB, BT, R] of each projection."""
    if weights := _fp8_weights(projections):
        bases = fp8.products(x, weights)
    else:
        spec = "tk,nk->tn" if w_transposed else "tk,kn->tn"
        bases = [_einsum(spec, x, p.dense_w[layer[0]]) for p in projections]
    parts = [
        _forward(x, p, base, block_adapter)
        for p, base in zip(projections, bases, strict=True)
    ]
    return [y for y, _ in parts], [s for _, s in parts]


def _forward(
    x: Float[Array, "T K"],
    projection: Projection,
    base: Float[Array, "T N"],
    block_adapter: Int[Array, " NB"],
) -> tuple[Float[Array, "T N"], Float[Array, "NB BT R"]]:
    """Adds bias and LoRA to the product of x and the base weight."""
    a, b, dropout = projection.a, projection.b, projection.dropout
    num_blocks = block_adapter.shape[0]
    slot_B = jnp.maximum(block_adapter, 0)
    x_B = x.reshape(num_blocks, -1, x.shape[1])
    if dropout is not None:
        x_B = jnp.where(dropout.keep(slot_B, x.shape), x_B, 0)
    s = _einsum("btk,bkr->btr", x_B, a.astype(x.dtype)[slot_B])
    s = (s * _factor(projection.scaling, dropout, slot_B)).astype(x.dtype)
    delta = _einsum("btr,brn->btn", s, b.astype(x.dtype)[slot_B])
    y = base.reshape(delta.shape) + delta
    if projection.bias is not None:
        y = y + projection.bias.astype(jnp.float32)
    # Padding blocks were computed with slot 0, which may hold anything. A product with
    # zero would keep its NaN, so select.
    y = jnp.where(block_adapter[:, None, None] >= 0, y, 0)
    return y.reshape(x.shape[0], -1).astype(x.dtype), s


def _sum_by_adapter(
    blocks: Float[Array, "NB P Q"], block_adapter: Int[Array, " NB"], num_slots: int
) -> Float[Array, "G P Q"]:
    """Sums each adapter's blocks in block order, by selection, as 0 * NaN is NaN."""
    mine = block_adapter == jnp.arange(num_slots)[:, None]
    return jnp.where(mine[:, :, None, None], blocks, 0).sum(axis=1)


def backward(
    dy: list[Array],
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    s: list[Array],
    layer: Int[Array, " 1"],
    block_adapter: Int[Array, " NB"],
    *,
    w_transposed: bool = False,
) -> tuple[Float[Array, "T K"], list[dict[str, Array]]]:
    """Computes dx [T, K] in x's dtype; `a` [G, K, R] and `b` [G, R, N] in float32."""
    if weights := _fp8_weights(projections):
        bases = fp8.input_gradients(dy, weights)
    else:
        spec = "tn,nk->tk" if w_transposed else "tn,kn->tk"
        pairs = zip(dy, projections, strict=True)
        bases = [_einsum(spec, dy_p, p.dense_w[layer[0]]) for dy_p, p in pairs]
    parts = [
        _backward(dy_p, x, p, base, s_p, block_adapter)
        for dy_p, p, base, s_p in zip(dy, projections, bases, s, strict=True)
    ]
    dx = functools.reduce(jnp.add, (part for part, _ in parts))
    return dx.astype(x.dtype), [gradients for _, gradients in parts]


def _backward(
    dy: Float[Array, "T N"],
    x: Float[Array, "T K"],
    projection: Projection,
    base: Float[Array, "T K"],
    s: Float[Array, "NB BT R"],
    block_adapter: Int[Array, " NB"],
) -> tuple[Float[Array, "T K"], dict[str, Array]]:
    """Adds LoRA's gradient of x to the base's; computes the gradients of A and B."""
    a, b, dropout = projection.a, projection.b, projection.dropout
    num_slots, num_blocks = a.shape[0], block_adapter.shape[0]
    slot_B = jnp.maximum(block_adapter, 0)
    x_B = x.reshape(num_blocks, -1, x.shape[1])
    dy_B = dy.reshape(num_blocks, -1, dy.shape[1])
    keep = None if dropout is None else dropout.keep(slot_B, x.shape)

    ds = _einsum("btn,brn->btr", dy_B, b.astype(x.dtype)[slot_B])
    ds = (ds * _factor(projection.scaling, dropout, slot_B)).astype(x.dtype)
    db = _sum_by_adapter(_einsum("btr,btn->brn", s, dy_B), block_adapter, num_slots)
    kept_B = x_B if keep is None else jnp.where(keep, x_B, 0)
    da = _sum_by_adapter(_einsum("btk,btr->bkr", kept_B, ds), block_adapter, num_slots)

    through = _einsum("btr,bkr->btk", ds, a.astype(x.dtype)[slot_B])
    if keep is not None:
        through = jnp.where(keep, through, 0)
    dx = base.reshape(through.shape) + through
    dx = jnp.where(block_adapter[:, None, None] >= 0, dx, 0)
    return dx.reshape(x.shape), {"a": da, "b": db}

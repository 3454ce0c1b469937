"""The multi-adapter LoRA linear in plain JAX, for any device.

Each token block gathers its own adapter. So no value of one adapter, not even a NaN,
reaches the rows of another. The masks and the float32 terms are stored in device
memory, which makes this slower than fused kernels.

This also defines the products of an fp8 base. The product of two e4m3 values is exact
in float32, in which the sums are computed. XLA uses the tensor cores of GPUs that have
e4m3; elsewhere, it converts the operands.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlora.pallas_kernels.dropout import entries
from jaxlora.pallas_kernels.expert_rows import RowPlan
from jaxlora.pallas_kernels.projection import LinearShape, Projection
from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.quantized.rows import quantize_rows, row_scale
from jaxlora.pallas_kernels.varying import vary, varying_axes


def unsupported(shape: LinearShape) -> str | None:
    """Returns why these kernels cannot run such a linear, or None if they can."""
    return None


def _fp8_weights(projections: tuple[Projection, ...]) -> list[Fp8Weight]:
    return [p.w for p in projections if isinstance(p.w, Fp8Weight)]


def _fp8_products(x: Array, weights: Sequence[Fp8Weight]) -> list[Array]:
    """Computes `x W^T` [T, N] in float32 for each weight, from x quantized by rows."""
    scale = row_scale(x)
    values = quantize_rows(x, scale)
    return [
        _einsum("tk,nk->tn", values, w.values) * w.scale * scale[:, None]
        for w in weights
    ]


def _fp8_input_gradients(
    dy: Sequence[Array], weights: Sequence[Fp8Weight]
) -> list[Array]:
    """Computes each weight's part of dx [T, K] in float32, from quantized dy.

    The scales of the output features lie along this product's sum, so dy is multiplied
    by them before it is quantized. A row has one scale for all weights, so that kernels
    can sum the parts in one accumulator.
    """
    pairs = list(zip(dy, weights, strict=True))
    scale = functools.reduce(jnp.maximum, (row_scale(d, w.scale) for d, w in pairs))
    parts = []
    for d, w in pairs:
        values = quantize_rows(d, scale, w.scale)
        if w.transposed is None:
            part = _einsum("tn,nk->tk", values, w.values)
        else:
            part = _einsum("tn,kn->tk", values, w.transposed)
        parts.append(part * scale[:, None])
    return parts


def _einsum(spec: str, x: Array, w: Array) -> Array:
    # Where XLA converts w, it would otherwise convert the weights of all layers in
    # advance, and keep them for the backward pass.
    x, w = lax.optimization_barrier((x, w))
    return jnp.einsum(spec, x, w, preferred_element_type=jnp.float32)


def _product(x: Array, y: Array, over: tuple[int, int]) -> Float[Array, "..."]:
    """Sums products over an axis of each; a first axis of blocks stays.

    `jnp.einsum` computes the same, but a linear takes half as long again to trace.
    """
    blocks = ((0,), (0,)) if x.ndim == 3 else ((), ())
    axes = (over[0],), (over[1],)
    return lax.dot_general(x, y, (axes, blocks), preferred_element_type=jnp.float32)


class _Blocks:
    """The token blocks of a call, as its projections read their tables.

    Padding blocks are computed with slot 0, which may hold anything. A product with
    zero would keep its NaN, so their results are left out by selection.
    """

    def __init__(self, slot: Int[Array, " NB"], layer: Int[Array, "*_"]):
        self.given_slot = slot
        self.layer = layer
        self.slot = jnp.maximum(slot, 0)
        self._is_live = (slot >= 0)[:, None, None]

    def product(
        self, x: Float[Array, "T D"], w: Float[Array, "L _ _"], axis: int
    ) -> Float[Array, "T _"]:
        """Returns the product of x and the layer's weight, summed over its axis."""
        return _product(x, entries(w, self.layer[0]), (1, axis))

    def bias(self, bias: Float[Array, " N"]) -> Float[Array, "..."]:
        """Returns the bias of each block's rows, or of all rows."""
        return bias.astype(jnp.float32)

    def split(self, rows: Float[Array, "T D"]) -> Float[Array, "NB BT D"]:
        return rows.reshape(self.slot.shape[0], -1, rows.shape[1])

    def live(self, rows: Float[Array, "NB BT D"]) -> Float[Array, "T D"]:
        """Joins the blocks; rows of padding become zero."""
        return jnp.where(self._is_live, rows, 0).reshape(-1, rows.shape[2])

    def keep(
        self, projection: Projection, shape: tuple[int, ...]
    ) -> Bool[Array, "NB BT K"] | None:
        """Returns which features of x are kept; None: all of them."""
        dropout = projection.dropout
        return None if dropout is None else dropout.keep(self.slot, shape)

    def factor(self, projection: Projection) -> Float[Array, "NB 1 1"]:
        """Returns the multiplier of s."""
        if projection.settings is not None:
            settings: Any = projection.settings  # of which no row is left out here
            factor = entries(settings.factor, settings.index[0])
        else:
            factor = projection.factor
        return entries(factor, self.slot)[:, None, None]

    def sum_by_adapter(
        self, blocks: Float[Array, "NB P Q"], num_slots: int
    ) -> Float[Array, "G P Q"]:
        """Sums each adapter's blocks in their order, by selection."""
        mine = self.given_slot == jnp.arange(num_slots)[:, None]
        return jnp.where(mine[:, :, None, None], blocks, 0).sum(axis=1)


class _ExpertBlocks(_Blocks):
    """The blocks of experts' rows, whose weight goes by their tile.

    Loops visit what is no padding, so that neither memory nor time grow with all
    experts' weights and all slots.
    """

    def __init__(self, plan: RowPlan, layer: Int[Array, " NT"]):
        super().__init__(plan.slot, layer)
        self._plan = plan

    def product(
        self, x: Float[Array, "T D"], w: Float[Array, "L _ _"], axis: int
    ) -> Float[Array, "T _"]:
        rows = x.shape[0] // self.layer.shape[0]

        def one(tile, y):
            x_tile = lax.dynamic_slice_in_dim(x, tile * rows, rows)
            part = _product(x_tile, entries(w, self.layer[tile]), (1, axis))
            return lax.dynamic_update_slice_in_dim(y, part, tile * rows, 0)

        zeros = jnp.zeros((x.shape[0], w.shape[2 - axis]), jnp.float32)
        zeros = vary(zeros, varying_axes((x, w)))
        return lax.fori_loop(0, self._plan.num_tiles[0], one, zeros)

    def bias(self, bias: Float[Array, "L N"]) -> Float[Array, "NB 1 N"]:
        of_block = jnp.repeat(self.layer, self.slot.shape[0] // self.layer.shape[0])
        return entries(bias.astype(jnp.float32), of_block)[:, None]

    def sum_by_adapter(
        self, blocks: Float[Array, "NB P Q"], num_slots: int
    ) -> Float[Array, "G P Q"]:
        plan = self._plan

        def one(i, sums):
            block = plan.order[i]
            slot = plan.slot[block]
            total = entries(sums, slot) + entries(blocks, block)
            return lax.dynamic_update_index_in_dim(sums, total, slot, 0)

        zeros = jnp.zeros((num_slots, *blocks.shape[1:]), blocks.dtype)
        zeros = vary(zeros, varying_axes(blocks))
        return lax.fori_loop(0, plan.starts[-1], one, zeros)


def _make_blocks(rows: Int[Array, " NB"] | RowPlan, layer: Array) -> _Blocks:
    if isinstance(rows, RowPlan):
        return _ExpertBlocks(rows, layer)
    return _Blocks(rows, layer)


def forward(
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    layer: Int[Array, " _"],
    block_adapter: Int[Array, " NB"] | RowPlan,
    *,
    w_transposed: bool = False,
) -> tuple[list[Array], list[Array]]:
    """Computes y [T, N] and s = scaling dropout(x) A [NB, BT, R] of each projection."""
    blocks = _make_blocks(block_adapter, layer)
    if weights := _fp8_weights(projections):
        bases = _fp8_products(x, weights)
    else:
        axis = 1 if w_transposed else 0
        bases = [blocks.product(x, p.dense_w, axis) for p in projections]
    parts = [
        _forward(blocks, x, p, base) for p, base in zip(projections, bases, strict=True)
    ]
    return [y for y, _ in parts], [s for _, s in parts]


def _forward(
    blocks: _Blocks,
    x: Float[Array, "T K"],
    projection: Projection,
    base: Float[Array, "T N"],
) -> tuple[Float[Array, "T N"], Float[Array, "NB BT R"]]:
    """Adds bias and LoRA to the product of x and the base weight."""
    x_B = blocks.split(x)
    if (keep := blocks.keep(projection, x.shape)) is not None:
        x_B = jnp.where(keep, x_B, 0)
    a_B = entries(projection.a.astype(x.dtype), blocks.slot)
    b_B = entries(projection.b.astype(x.dtype), blocks.slot)
    s = _product(x_B, a_B, (2, 1))
    s = (s * blocks.factor(projection)).astype(x.dtype)
    y = blocks.split(base) + _product(s, b_B, (2, 1))
    if projection.bias is not None:
        y = y + blocks.bias(projection.bias)
    return blocks.live(y).astype(x.dtype), s


def backward(
    dy: list[Array],
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    s: list[Array],
    layer: Int[Array, " _"],
    block_adapter: Int[Array, " NB"] | RowPlan,
    row_weights: Float[Array, " T"] | None = None,
    *,
    w_transposed: bool = False,
) -> tuple[Float[Array, "T K"], list[dict[str, Array]]]:
    """Computes dx [T, K] in x's dtype; `a` [G, K, R] and `b` [G, R, N] in float32.

    With weights of rows, the gradients of A and B are those of weighted rows.
    """
    blocks = _make_blocks(block_adapter, layer)
    if weights := _fp8_weights(projections):
        bases = _fp8_input_gradients(dy, weights)
    else:
        axis, pairs = 0 if w_transposed else 1, zip(dy, projections, strict=True)
        bases = [blocks.product(dy_p, p.dense_w, axis) for dy_p, p in pairs]
    parts = [
        _backward(blocks, dy_p, x, p, base, s_p, row_weights)
        for dy_p, p, base, s_p in zip(dy, projections, bases, s, strict=True)
    ]
    dx = functools.reduce(jnp.add, (part for part, _ in parts))
    return dx.astype(x.dtype), [gradients for _, gradients in parts]


def _backward(
    blocks: _Blocks,
    dy: Float[Array, "T N"],
    x: Float[Array, "T K"],
    projection: Projection,
    base: Float[Array, "T K"],
    s: Float[Array, "NB BT R"],
    row_weights: Float[Array, " T"] | None,
) -> tuple[Float[Array, "T K"], dict[str, Array]]:
    """Adds LoRA's gradient of x to the base's; computes the gradients of A and B."""
    x_B, dy_B = blocks.split(x), blocks.split(dy)
    keep = blocks.keep(projection, x.shape)
    num_slots = projection.a.shape[0]
    a_B = entries(projection.a.astype(x.dtype), blocks.slot)
    b_B = entries(projection.b.astype(x.dtype), blocks.slot)

    ds = _product(dy_B, b_B, (2, 2))
    ds = (ds * blocks.factor(projection)).astype(x.dtype)
    s_w, ds_w = s, ds
    if row_weights is not None:
        of_block = blocks.split(row_weights[:, None])
        s_w, ds_w = ((one * of_block).astype(x.dtype) for one in (s, ds))
    db = blocks.sum_by_adapter(_product(s_w, dy_B, (1, 1)), num_slots)
    kept_B = x_B if keep is None else jnp.where(keep, x_B, 0)
    da = blocks.sum_by_adapter(_product(kept_B, ds_w, (1, 1)), num_slots)

    through = _product(ds, a_B, (2, 2))
    if keep is not None:
        through = jnp.where(keep, through, 0)
    return blocks.live(blocks.split(base) + through), {"a": da, "b": db}

"""Forward and backward pass of the `mosaic` back end, as sequences of kernels.

Forward: shrink (s = factor dropout(x) A), then expand (y = x W + s B).
Backward: shrink (ds = factor dy B^T), then in one launch expand (dx = dy W^T +
mask (ds A^T)) and outer (dA = dropout(x)^T ds and dB = s^T dy). The kernels that read
x, or sum dx, do so for all projections at once. See docs/kernels.md.

References:
    LoRAFusion, arXiv 2510.00206, section 5.1, Figures 9 to 11.
"""

import functools

import jax
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.dropout import TILE_TOKENS
from jaxlora.pallas_kernels.mosaic import fp8_layer
from jaxlora.pallas_kernels.mosaic.backward import run_backward
from jaxlora.pallas_kernels.mosaic.mask import make_mask
from jaxlora.pallas_kernels.mosaic.products import (
    Term,
    expand,
    expand_work,
    outer_work,
    shrink,
)
from jaxlora.pallas_kernels.mosaic.ring_shape import ROWS, STEP
from jaxlora.pallas_kernels.operands import MAX_RANK, make_operands
from jaxlora.pallas_kernels.projection import Projection
from jaxlora.pallas_kernels.settings import RANK_STEP

# expand keeps the stages of all ranks of a tile filled.
assert RANK_STEP == STEP and MAX_RANK == 4 * STEP
assert ROWS == TILE_TOKENS


def _swap_last_axes(x: Array) -> Array:
    return x.transpose(0, 2, 1)


@functools.partial(jax.jit, static_argnames=("w_transposed",))
def forward(
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    layer: Int[Array, " 1"],
    block_adapter: Int[Array, " NB"],
    s: list[Array] | None = None,
    *,
    w_transposed: bool = False,
) -> tuple[list[Array], list[Array]]:
    """Computes y [T, N] and s = scaling * dropout(x) A [T, R] of each projection.

    The backward pass reads s again. In each block of rows, only the ranks of the
    block's own adapter are ever read. If s is given, it was computed beside x.
    """
    if fp8_layer.fp8_weights(projections):
        assert s is None, "its kernels quantize x where they compute s"
        return fp8_layer.forward(x, projections, block_adapter)
    given = make_operands(x, projections, block_adapter)
    if s is None:
        a = [_swap_last_axes(a) for a in given.a]
        masks = list(map(make_mask, given.masks))
        s = shrink(x, a, given.settings, given.blocks, masks)
    y = []
    for i, p in enumerate(projections):
        b = _swap_last_axes(given.b[i]) if w_transposed else given.b[i]
        term = Term(x, p.dense_w, s[i], b, given.settings[i])
        y.append(expand([term], layer, given.blocks, p.bias, transposed=w_transposed))
    return y, s


@functools.partial(jax.jit, static_argnames=("w_transposed",))
def backward(
    dy: list[Array],
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    s: list[Array],
    layer: Int[Array, " 1"],
    block_adapter: Int[Array, " NB"],
    ds: list[Array] | None = None,
    *,
    w_transposed: bool = False,
) -> tuple[Float[Array, "T K"], list[dict[str, Array]]]:
    """Computes dx [T, K] in x's dtype; `a` [G, K, R] and `b` [G, R, N] in float32.

    If ds is given, it was computed beside dy.
    """
    if fp8_layer.fp8_weights(projections):
        assert ds is None, "its kernels quantize dy where they compute ds"
        return fp8_layer.backward(dy, x, projections, s, block_adapter)
    given = make_operands(x, projections, block_adapter)
    settings, blocks = given.settings, given.blocks
    masks = list(map(make_mask, given.masks))
    made, outers = [], []
    for i, dy_i in enumerate(dy):
        unmasked = [settings[i]], blocks, []
        made += [ds[i]] if ds else shrink(dy_i, [given.b[i]], *unmasked)
        outers.append(outer_work(dy_i, [s[i]], *unmasked, transposed=True))
    outers.append(outer_work(x, made, settings, blocks, masks, transposed=False))
    a = [_swap_last_axes(a) for a in given.a] if w_transposed else given.a
    w = [p.dense_w for p in projections]
    terms = [Term(*one) for one in zip(dy, w, made, a, settings, strict=True)]

    def work(i):
        return expand_work(
            terms[i], layer, blocks, masks=masks[i], transposed=not w_transposed
        )

    return run_backward(work, outers, [p.a.shape[2] for p in projections])

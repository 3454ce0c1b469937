"""Forward and backward pass of the `mosaic` back end, as sequences of kernels.

Forward: shrink (s = factor dropout(x) A), then expand (y = x W + s B).
Backward: shrink (ds = factor dy B^T), then in one launch expand (dx = dy W^T +
mask (ds A^T)) and outer (dA = dropout(x)^T ds and dB = s^T dy). The kernels that read
x, or sum dx, do so for all projections at once.

On an fp8 base, the products with W are of e4m3, and the shrinks also quantize their
rows: x by its own rows' scales, and each dy times the scales of its output features, by
one scale a row for all projections. So one accumulator can sum dx over them. Without
masks, s comes divided by the rows' scales, and its term shares the accumulator with the
frozen product. The gradients of A and B are computed from x and dy as they are. See
docs/hopper_kernels.md.

References:
    LoRAFusion, arXiv 2510.00206, section 5.1, Figures 9 to 11.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlora.pallas_kernels.dropout import TILE_TOKENS
from jaxlora.pallas_kernels.expert_rows import TILE_ROWS, RowPlan
from jaxlora.pallas_kernels.mosaic.launch import Work
from jaxlora.pallas_kernels.mosaic.mask import Mask, make_mask
from jaxlora.pallas_kernels.mosaic.products import (
    Side,
    expand_with_outers,
    expand_work,
    outer_work,
    produce,
    quantize_shrink,
    run_expand,
    shrink,
)
from jaxlora.pallas_kernels.mosaic.ring import COMPUTE_WGS, ROWS, STEP
from jaxlora.pallas_kernels.operands import (
    MAX_RANK,
    Blocks,
    Operands,
    Term,
    finite,
    make_operands,
    marked,
    padded_rank,
    weigh,
)
from jaxlora.pallas_kernels.parts import Parts
from jaxlora.pallas_kernels.projection import RANK_STEP, Projection
from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.quantized.rows import row_scale
from jaxlora.pallas_kernels.row_function import RowArguments, RowFunction

# expand keeps the stages of all ranks of a tile filled.
assert RANK_STEP == STEP and MAX_RANK == 4 * STEP
assert ROWS == TILE_TOKENS and TILE_ROWS == COMPUTE_WGS * ROWS


def _swap_last_axes(x: Array) -> Array:
    return x.transpose(0, 2, 1)


def _fp8_weights(projections: Sequence[Projection]) -> list[Fp8Weight]:
    """Returns the weights of projections on an fp8 base; others have none."""
    return [p.w for p in projections if isinstance(p.w, Fp8Weight)]


@functools.partial(jax.jit, static_argnames=("w_transposed",))
def forward(
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    layer: Int[Array, " _"],
    block_adapter: Int[Array, " NB"] | RowPlan,
    s: list[Array] | None = None,
    *,
    w_transposed: bool = False,
) -> tuple[list[Array], list[Array]]:
    """Computes y [T, N] and s = scaling * dropout(x) A [T, R] of each projection.

    The backward pass reads s again. In each block of rows, only the ranks of the
    block's own adapter are ever read. If s is given, it was computed beside x.
    """
    given = make_operands(x, projections, block_adapter)
    if weights := _fp8_weights(projections):
        assert s is None, "its kernels quantize x where they compute s"
        return _fp8_forward(x, projections, weights, given)
    if s is None:
        a = [_swap_last_axes(a) for a in given.a]
        settings = given.settings
        if given.blocks.shared is not None:
            settings = marked(settings, projections)
        s = shrink(x, a, settings, given.blocks, _masks(given))
    y = []
    for i, p in enumerate(projections):
        b = _swap_last_axes(given.b[i]) if w_transposed else given.b[i]
        blocks, transposed = given.blocks, w_transposed
        b = b if blocks.shared is None else finite(b)
        term = Term(x, p.dense_w, s[i], b, given.settings[i])
        work = expand_work([term], layer, blocks, p.bias, transposed=transposed)
        y.append(run_expand(work))
    return y, s


def _bad_blocks(rows: Sequence[Float[Array, "T R"]]) -> Bool[Array, " NB"]:
    """Returns which blocks have rows of side products that are not finite."""
    total = sum(one.astype(jnp.float32) for one in rows)
    return ~jnp.isfinite(total).reshape(-1, ROWS * rows[0].shape[1]).all(1)


def _masks(given: Operands) -> list[Mask]:
    num_slots = given.a[0].shape[0]
    return [make_mask(source, num_slots) for source in given.masks]


def _fp8_forward(
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    weights: list[Fp8Weight],
    given: Operands,
) -> tuple[list[Array], list[Array]]:
    """Computes `forward` on an fp8 base."""
    scale = row_scale(x)
    a = [_swap_last_axes(a) for a in given.a]
    shared = given.settings, given.blocks, _masks(given)
    rows = quantize_shrink(x, a, *shared, inverse=1 / scale)
    y = []
    for i, (p, w) in enumerate(zip(projections, weights, strict=True)):
        b, values = _swap_last_axes(given.b[i]), w.values[None]
        b = (b.astype(jnp.float32) / w.scale[:, None]).astype(b.dtype)
        term = Term(rows.xq, values, rows.folded[i], b, given.settings[i])
        work = expand_work(
            [term],
            jnp.zeros(1, jnp.int32),
            given.blocks,
            p.bias,
            transposed=True,
            scales=(scale, w.scale),
        )
        y.append(run_expand(work))
    return y, rows.s


@functools.partial(jax.jit, static_argnames=("w_transposed",))
def backward(
    dy: list[Array],
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    s: list[Array],
    layer: Int[Array, " _"],
    block_adapter: Int[Array, " NB"] | RowPlan,
    ds: list[Array] | None = None,
    row_weights: Float[Array, " T"] | None = None,
    *,
    w_transposed: bool = False,
) -> tuple[Float[Array, "T K"], list[dict[str, Array]]]:
    """Computes dx [T, K] in x's dtype; `a` [G, K, R] and `b` [G, R, N] in float32.

    If ds is given, it was computed beside dy. With weights of rows, the gradients of A
    and B are those of weighted rows; see `Backward`.
    """
    given = make_operands(x, projections, block_adapter)
    ranks = [p.a.shape[2] for p in projections]
    if weights := _fp8_weights(projections):
        assert ds is None, "its kernels quantize dy where they compute ds"
        return _fp8_backward(dy, x, weights, s, given, ranks)
    settings, blocks, masks = given.settings, given.blocks, _masks(given)
    # Experts have many slots of few ranks. A row of ranks in device memory has at least
    # 16, but a table may have fewer rows.
    largest = max(ranks) if blocks.num_tiles is not None else None
    is_swapped = largest is not None and largest < given.a[0].shape[2] and not masks
    made, outers = [], []
    for i, dy_i in enumerate(dy):
        made += [ds[i]] if ds else shrink(dy_i, [given.b[i]], [settings[i]], blocks, [])
    # Rows of x and dy that are not finite have such side products, too.
    is_bad = None if blocks.shared is None else _bad_blocks([*s, *made])
    more: dict[str, Any] = {"num_ranks": largest, "is_bad": is_bad}
    for i, dy_i in enumerate(dy):
        s_i, own = [weigh(s[i], row_weights)], ([settings[i]], blocks, [])
        outers.append(outer_work(dy_i, s_i, *own, transposed=True, **more))
    own = [weigh(one, row_weights) for one in made], settings, blocks, masks
    outers.append(outer_work(x, *own, transposed=is_swapped, **more))
    a = [_swap_last_axes(a) for a in given.a] if w_transposed else given.a
    a = a if blocks.shared is None else [finite(one) for one in a]
    w, of_terms = [p.dense_w for p in projections], masks or [None] * len(dy)
    each = zip(dy, w, made, a, settings, of_terms, strict=True)
    terms = [Term(*one) for one in each]

    def work(i):
        return expand_work(terms[i], layer, blocks, transposed=not w_transposed)

    return _run_backward(work, outers, ranks, blocks, is_swapped=is_swapped)


def _fp8_backward(
    dy: list[Array],
    x: Float[Array, "T K"],
    weights: list[Fp8Weight],
    s: list[Array],
    given: Operands,
    ranks: list[int],
) -> tuple[Float[Array, "T K"], list[dict[str, Array]]]:
    """Computes `backward` on an fp8 base."""
    settings, blocks, masks = given.settings, given.blocks, _masks(given)
    transposed, dy = _transposed(weights, dy)
    scales = (row_scale(d, w.scale) for d, w in zip(dy, weights, strict=True))
    scale = functools.reduce(jnp.maximum, scales)
    ds, terms, outers = [], [], []
    for i, dy_i in enumerate(dy):
        unmasked = [settings[i]], blocks, []
        factors = {"inverse": 1 / scale, "features": weights[i].scale}
        rows = quantize_shrink(dy_i, [given.b[i]], *unmasked, **factors)
        # A masked term cannot share the accumulator with the frozen product.
        (s_i,), mask = (rows.s, masks[i]) if masks else (rows.folded, None)
        w = transposed[i][None]
        term = Term(rows.xq, w, s_i, given.a[i], settings[i], mask)
        terms.append(term)
        ds += rows.s
        outers.append(outer_work(dy_i, [s[i]], *unmasked, transposed=True))
    outers.append(outer_work(x, ds, settings, blocks, masks, transposed=False))

    def work(i):
        layer = jnp.zeros(1, jnp.int32)
        return expand_work(terms[i], layer, blocks, transposed=True, scales=(scale,))

    return _run_backward(work, outers, ranks, blocks)


def _transposed(
    weights: list[Fp8Weight], dy: list[Array]
) -> tuple[list[Array], list[Array]]:
    """Returns each weight's values [K, N]; and dy, which must be read from here.

    A copy that is made here is tied to dy, so that XLA makes it when this pass needs it
    rather than for all layers in advance.
    """
    values = [w.values for w in weights if w.transposed is None]
    if values:
        values, dy = jax.lax.optimization_barrier((values, dy))
    rest = iter(values)
    copies = [next(rest).T if w.transposed is None else w.transposed for w in weights]
    return copies, dy


def _run_backward(
    expand: Callable[[slice], Work],
    outers: list[tuple[Work, Parts]],
    ranks: list[int],
    blocks: Blocks,
    *,
    is_swapped: bool = False,
) -> tuple[Array, list[dict[str, Array]]]:
    """Runs expand and the outer products, as many projections in a launch as fit.

    The stages of the ranks of all projections of a launch must fit into the ring.

    Args:
        expand: Makes the work that sums the terms of some of the projections.
        outers: The work of dB for each projection, then that of dA for all of them.
        ranks: The largest rank of each projection.
        blocks: Slots of the rows.
        is_swapped: Whether dA is computed as [G, R, K].

    Returns:
        dx [T, K], and for each projection `a` [G, K, R] and `b` [G, R, N], in float32.
    """
    dx, gradients = [], []
    group = MAX_RANK // max(padded_rank(max(ranks)), STEP)
    for first in range(0, len(ranks), group):
        some = expand(slice(first, first + group))
        part, computed = expand_with_outers(some, outers, blocks)
        dx.append(part)
        gradients += computed
        outers = []
    *db, da = gradients
    da = [_swap_last_axes(one) for one in da] if is_swapped else da
    return functools.reduce(jnp.add, dx), [
        {"a": da_i[:, :, :r], "b": db_i[:, :r]}
        for da_i, (db_i,), r in zip(da, db, ranks, strict=True)
    ]


def produce_beside(
    function: RowFunction,
    arguments: RowArguments,
    projections: Sequence[Projection],
    block_adapter: Array | RowPlan,
    *,
    is_gradient: bool,
) -> tuple[list[Array], list[Array]]:
    """Computes a row-wise function with the side products of linears.

    See `Backend.produce`.
    """
    given = make_operands(arguments.tiles[0], projections, block_adapter)
    a = given.b if is_gradient else [_swap_last_axes(a) for a in given.a]
    sides = [
        Side(result=i if is_gradient else 0, a=one, settings=settings)
        for i, (one, settings) in enumerate(zip(a, given.settings, strict=True))
    ]
    masks = [] if is_gradient else _masks(given)
    return produce(function, arguments, sides, given.blocks, masks)

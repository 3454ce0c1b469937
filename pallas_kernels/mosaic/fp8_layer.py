"""Forward and backward pass of the `mosaic` back end on an fp8 base.

The passes are those of passes.py with e4m3 products. The shrinks also quantize their
rows: x by its own rows' scales, and each dy times the scales of its output features,
by one scale a row for all projections. So one accumulator can sum dx over them.
Without masks, s comes divided by the rows' scales, and its term shares the accumulator
with the frozen product. The gradients of A and B are computed from x and dy as they
are. See docs/kernels.md.

References:
    LoRAFusion, arXiv 2510.00206, section 5.1, Figures 9 to 11.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.mosaic.backward import run_backward
from jaxlora.pallas_kernels.mosaic.fp8_products import expand_fp8, expand_fp8_work
from jaxlora.pallas_kernels.mosaic.mask import make_mask
from jaxlora.pallas_kernels.mosaic.products import (
    RowFactors,
    Term,
    outer_work,
    quantize_shrink,
)
from jaxlora.pallas_kernels.operands import make_operands
from jaxlora.pallas_kernels.projection import Projection
from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.quantized.rows import row_scale


def fp8_weights(projections: Sequence[Projection]) -> list[Fp8Weight]:
    """Returns the weights of projections on an fp8 base; others have none."""
    return [p.w for p in projections if isinstance(p.w, Fp8Weight)]


def forward(
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    block_adapter: Int[Array, " NB"],
) -> tuple[list[Array], list[Array]]:
    """Computes y [T, N] and s = scaling * dropout(x) A [T, R] of each projection."""
    given = make_operands(x, projections, block_adapter)
    scale = row_scale(x)
    rows = quantize_shrink(
        x,
        [a.transpose(0, 2, 1) for a in given.a],
        given.settings,
        given.blocks,
        list(map(make_mask, given.masks)),
        RowFactors(inverse=1 / scale),
    )
    y = []
    for i, (p, w) in enumerate(zip(projections, fp8_weights(projections), strict=True)):
        b = given.b[i].transpose(0, 2, 1)
        term = Term(rows.xq, w.values, rows.folded[i], b, given.settings[i])
        y.append(expand_fp8([term], scale, w.scale, given.blocks, p.bias))
    return y, rows.s


def backward(
    dy: list[Array],
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    s: list[Array],
    block_adapter: Int[Array, " NB"],
) -> tuple[Float[Array, "T K"], list[dict[str, Array]]]:
    """Computes dx [T, K] in x's dtype; `a` [G, K, R] and `b` [G, R, N] in float32."""
    given = make_operands(x, projections, block_adapter)
    settings, blocks = given.settings, given.blocks
    masks = list(map(make_mask, given.masks))
    weights = fp8_weights(projections)
    transposed, dy = _transposed(weights, dy)
    scales = (row_scale(d, w.scale) for d, w in zip(dy, weights, strict=True))
    scale = functools.reduce(jnp.maximum, scales)
    ds, terms, outers = [], [], []
    for i, dy_i in enumerate(dy):
        unmasked = [settings[i]], blocks, []
        factors = RowFactors(inverse=1 / scale, features=weights[i].scale)
        rows = quantize_shrink(dy_i, [given.b[i]], *unmasked, factors)
        # A masked term cannot share the accumulator with the frozen product.
        (s_i,) = rows.s if masks else rows.folded
        terms.append(Term(rows.xq, transposed[i], s_i, given.a[i], settings[i]))
        ds += rows.s
        outers.append(outer_work(dy_i, [s[i]], *unmasked, transposed=True))
    outers.append(outer_work(x, ds, settings, blocks, masks, transposed=False))

    def work(i):
        return expand_fp8_work(terms[i], scale, None, blocks, masks=masks[i])

    return run_backward(work, outers, [p.a.shape[2] for p in projections])


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

"""Forward and backward pass of the `triton` back end, as sequences of kernels.

Forward: shrink (s = factor dropout(x) A), then expand (y = x W + s B).
Backward: dual (ds = factor dy B^T and dB = s^T dy from one read of dy), then expand
(dx = dy W^T + mask (ds A^T)) and outer (dA = dropout(x)^T ds). The kernels that read x,
or sum dx, do so for up to three projections at once. See docs/kernels.md.

References:
    LoRAFusion, arXiv 2510.00206, section 5.1, Figures 9 to 11.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.expert_rows import RowPlan
from jaxlora.pallas_kernels.operands import Term, make_operands, weigh
from jaxlora.pallas_kernels.projection import Projection
from jaxlora.pallas_kernels.triton.arguments import MAX_PROJECTIONS
from jaxlora.pallas_kernels.triton.dual import dual
from jaxlora.pallas_kernels.triton.expand import expand
from jaxlora.pallas_kernels.triton.outer import outer
from jaxlora.pallas_kernels.triton.shrink import shrink
from jaxlora.pallas_kernels.triton.target import Target


@functools.partial(jax.jit, static_argnames=("w_transposed", "target"))
def forward(
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    layer: Int[Array, " _"],
    block_adapter: Int[Array, " NB"] | RowPlan,
    *,
    w_transposed: bool,
    target: Target,
) -> tuple[list[Array], list[Array]]:
    """Computes y [T, N] and s = scaling * dropout(x) A [T, R] of each projection."""
    given = make_operands(x, projections, block_adapter)
    s = shrink(
        x,
        given.a,
        given.settings,
        given.masks,
        given.blocks,
        rank_first=False,
        target=target,
    )
    y = [
        expand(
            [Term(x=x, w=p.dense_w, s=s[i], b=given.b[i], settings=given.settings[i])],
            layer,
            given.blocks,
            bias=p.bias,
            transposed=w_transposed,
            rank_last=False,
            target=target,
        )
        for i, p in enumerate(projections)
    ]
    return y, s


@functools.partial(jax.jit, static_argnames=("w_transposed", "target"))
def backward(
    dy: list[Array],
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    s: list[Array],
    layer: Int[Array, " _"],
    block_adapter: Int[Array, " NB"] | RowPlan,
    row_weights: Float[Array, " T"] | None = None,
    *,
    w_transposed: bool,
    target: Target,
) -> tuple[Float[Array, "T K"], list[dict[str, Array]]]:
    """Computes dx [T, K] in x's dtype; `a` [G, K, R] and `b` [G, R, N] in float32.

    With weights of rows, the gradients of A and B are those of weighted rows.
    """
    given = make_operands(x, projections, block_adapter)
    settings, masks, blocks = given.settings, given.masks, given.blocks
    both = [
        dual(
            dy_i,
            weigh(s[i], row_weights),
            given.b[i],
            settings[i],
            blocks,
            target=target,
        )
        for i, dy_i in enumerate(dy)
    ]
    ds = [ds_i for ds_i, _ in both]
    narrow = [weigh(one, row_weights) for one in ds]
    da = outer(x, narrow, settings, masks, blocks, target=target)
    w, of_terms = [p.dense_w for p in projections], masks or [None] * len(dy)
    each = zip(dy, w, ds, given.a, settings, of_terms, strict=True)
    terms = [Term(*one) for one in each]
    dx = [
        expand(
            terms[first : first + MAX_PROJECTIONS],
            layer,
            blocks,
            transposed=not w_transposed,
            rank_last=True,
            target=target,
        )
        for first in range(0, len(terms), MAX_PROJECTIONS)
    ]
    ranks = [p.a.shape[2] for p in projections]
    return functools.reduce(jnp.add, dx), [
        {"a": da_i[:, :, :r], "b": db_i[:, :r]}
        for da_i, (_, db_i), r in zip(da, both, ranks, strict=True)
    ]

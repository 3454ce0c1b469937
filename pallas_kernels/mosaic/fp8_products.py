"""Expand with e4m3 operands: `expand_fp8_work` and `expand_fp8`.

The frozen product takes `x = xs * xq` and `W = ws * wq`, with xq and wq in
float8_e4m3fn, a scale xs for each row of x and a scale ws for each column of W. Its
accumulator holds y / (xs ws). So the LoRA term can share it as
`(s / xs) (B / ws)`, in bfloat16. See docs/kernels.md.

References:
    FP8 Formats for Deep Learning, arXiv 2209.05433, section 3 (the e4m3 format).
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlora.pallas_kernels.mosaic.launch import Work
from jaxlora.pallas_kernels.mosaic.mask import Mask
from jaxlora.pallas_kernels.mosaic.products import Term, expand_work, run_expand
from jaxlora.pallas_kernels.routing import Blocks


def expand_fp8_work(
    terms: Sequence[Term],
    row_scale: Float[Array, " T"],
    column_scale: Float[Array, " N"] | None,
    blocks: Blocks,
    bias: Float[Array, " N"] | None = None,
    masks: Sequence[Mask] = (),
    *,
    band: int | None = None,
) -> Work:
    """Makes the work that computes y = xs ws (sum of xq wq^T) + mask * (s B) + bias.

    The work can be run with outer products by `expand_with_outers`. y, [T, N], has the
    dtype of s. Padding rows of y are zero, whatever the operands hold there.

    Args:
        terms: The terms of the sum. In each, x is xq, [T, K] float8_e4m3fn; w is wq,
            [N, K] float8_e4m3fn; s is [T, R] bfloat16; b is B, [G, N, R] in any float
            dtype. s is *divided by row_scale* if there are no masks, and as it is with
            masks. K and N are multiples of 64.
        row_scale: xs of the rows, the same in all terms, float32 and positive.
        column_scale: ws of the columns, float32; None: 1. At least about 1e-30, also of
            columns that are all zero, so that B / ws is finite in bfloat16.
        blocks: Slots of the rows.
        bias: [N].
        masks: Mask of each term; empty without dropout.
        band: Tile rows visited together; None: the tuning table's choice.
    """
    divisor = None if masks else column_scale
    terms = [
        dataclasses.replace(
            term, w=term.w[None], b=_divided(term.b, divisor, term.s.dtype)
        )
        for term in terms
    ]
    return expand_work(
        terms,
        jnp.zeros(1, jnp.int32),
        blocks,
        bias,
        masks,
        transposed=True,
        band=band,
        scales=(row_scale,) if column_scale is None else (row_scale, column_scale),
    )


def _divided(b, divisor, dtype):
    """Returns B / ws in a dtype; B is [G, N, R]."""
    if divisor is not None:
        b = b.astype(jnp.float32) / divisor[:, None]
    return b.astype(dtype)


def expand_fp8(*args, **kwargs) -> Array:
    """Runs `expand_fp8_work` alone and returns y, [T, N]."""
    return run_expand(expand_fp8_work(*args, **kwargs))

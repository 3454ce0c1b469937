"""The `mosaic` back end: which linears it runs, and its forward and backward pass.

The passes are in passes.py, which imports Pallas' Mosaic back end and with it MLIR's
dialects. It is imported when a pass is traced: most starts of a run load programs that
were kept, and trace nothing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.mosaic.hopper import unsupported_device
from jaxlora.pallas_kernels.operands import unsupported_linear
from jaxlora.pallas_kernels.projection import LinearShape, Projection
from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.settings import RANK_STEP

__all__ = ["backward", "forward", "unsupported"]


def unsupported(shape: LinearShape) -> str | None:
    """Returns why these kernels cannot run such a linear here, or None if they can."""
    if (reason := unsupported_device()) is not None:
        return reason
    if shape.weight_format != Fp8Weight.format:
        return unsupported_linear(shape, multiple=RANK_STEP, least=2 * RANK_STEP)
    if shape.dtype != jnp.bfloat16:
        name = jnp.dtype(shape.dtype).name
        return f"with fp8 weights its kernels take x in bfloat16 only, not {name}"
    # Both passes copy whole steps of 128 bytes from device memory.
    return unsupported_linear(shape, multiple=2 * RANK_STEP)


def forward(
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    layer: Int[Array, " 1"],
    block_adapter: Int[Array, " NB"],
    *,
    w_transposed: bool = False,
) -> tuple[list[Array], list[Array]]:
    """Computes y [T, N] and s = scaling * dropout(x) A [T, R] of each projection.

    The backward pass reads s again. In each block of rows, only the ranks of the
    block's own adapter are ever written or read.
    """
    from jaxlora.pallas_kernels.mosaic import passes

    return passes.forward(
        x, projections, layer, block_adapter, w_transposed=w_transposed
    )


def backward(
    dy: list[Array],
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    s: list[Array],
    layer: Int[Array, " 1"],
    block_adapter: Int[Array, " NB"],
    *,
    w_transposed: bool = False,
) -> tuple[Float[Array, "T K"], list[dict[str, jax.Array]]]:
    """Computes dx [T, K] in x's dtype; `a` [G, K, R] and `b` [G, R, N] in float32."""
    from jaxlora.pallas_kernels.mosaic import passes

    return passes.backward(
        dy, x, projections, s, layer, block_adapter, w_transposed=w_transposed
    )

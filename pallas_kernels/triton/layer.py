"""The `triton` back end: which linears it runs, and its forward and backward pass.

The passes are in passes.py, which needs the optional packages and is imported when a
pass is traced.
"""

import jax
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.operands import unsupported_linear
from jaxlora.pallas_kernels.projection import LinearShape, Projection
from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.triton.target import (
    present_target,
    slow_device,
    unsupported_device,
)

__all__ = ["backward", "forward", "slow_device", "unsupported"]

_ALIGNED_FEATURES = 8  # rows of 16 bytes, which one asynchronous copy moves


def unsupported(shape: LinearShape) -> str | None:
    """Returns why these kernels cannot run such a linear here, or None if they can."""
    if (reason := unsupported_device()) is not None:
        return reason
    if shape.weight_format == Fp8Weight.format:
        return "its kernels have no products with fp8 weights"
    return unsupported_linear(shape, multiple=_ALIGNED_FEATURES)


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
    block's own adapter are ever defined or read.
    """
    from jaxlora.pallas_kernels.triton import passes

    return passes.forward(
        x,
        projections,
        layer,
        block_adapter,
        w_transposed=w_transposed,
        target=present_target(),
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
    from jaxlora.pallas_kernels.triton import passes

    return passes.backward(
        dy,
        x,
        projections,
        s,
        layer,
        block_adapter,
        w_transposed=w_transposed,
        target=present_target(),
    )

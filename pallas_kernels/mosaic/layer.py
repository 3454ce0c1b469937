"""The `mosaic` back end: which linears it runs, and its forward and backward pass.

The passes are in passes.py, which imports Pallas' Mosaic back end and with it MLIR's
dialects. It is imported when a pass is traced: most starts of a run load programs that
were kept, and trace nothing.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.mosaic.hopper import unsupported_device
from jaxlora.pallas_kernels.operands import unsupported_linear
from jaxlora.pallas_kernels.projection import LinearShape, Projection
from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.row_function import RowArguments, RowFunction
from jaxlora.pallas_kernels.settings import RANK_STEP

__all__ = ["backward", "forward", "produce", "unsupported", "unsupported_producer"]


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
    s: list[Array] | None = None,
) -> tuple[list[Array], list[Array]]:
    """Computes y [T, N] and s = scaling * dropout(x) A [T, R] of each projection.

    The backward pass reads s again. In each block of rows, only the ranks of the
    block's own adapter are ever read. If s is given, it was computed beside x.
    """
    from jaxlora.pallas_kernels.mosaic import passes

    return passes.forward(
        x, projections, layer, block_adapter, s, w_transposed=w_transposed
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
    ds: list[Array] | None = None,
) -> tuple[Float[Array, "T K"], list[dict[str, jax.Array]]]:
    """Computes dx [T, K] in x's dtype; `a` [G, K, R] and `b` [G, R, N] in float32.

    If ds is given, it was computed beside dy.
    """
    from jaxlora.pallas_kernels.mosaic import passes

    return passes.backward(
        dy, x, projections, s, layer, block_adapter, ds, w_transposed=w_transposed
    )


def unsupported_producer(
    function: RowFunction,
    arguments: RowArguments,
    projections: Sequence[Projection],
    *,
    is_gradient: bool,
) -> str | None:
    """Returns why the kernel of a row-wise function cannot run here; None if it can.

    Args:
        function: The function.
        arguments: Its arguments, or their shapes.
        projections: The linears that take its result.
        is_gradient: Whether its results are the gradients of their outputs.
    """
    if (reason := unsupported_device()) is not None:
        return reason
    if any(isinstance(p.w, Fp8Weight) for p in projections):
        return "the rows of linears on an fp8 base are quantized before their products"
    from jaxlora.pallas_kernels.mosaic import producers

    return producers.unsupported(
        function, arguments, projections, is_gradient=is_gradient
    )


def produce(
    function: RowFunction,
    arguments: RowArguments,
    projections: Sequence[Projection],
    block_adapter: Int[Array, " NB"],
    *,
    is_gradient: bool,
) -> tuple[list[Array], list[Array]]:
    """Computes a row-wise function with its side products; see `backends.Produce`."""
    from jaxlora.pallas_kernels.mosaic import producers

    return producers.produce_for(
        function, arguments, projections, block_adapter, is_gradient=is_gradient
    )

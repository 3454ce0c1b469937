"""Which linears and row-wise functions the `mosaic` back end runs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlora.pallas_kernels.mosaic.hopper import unsupported_device
from jaxlora.pallas_kernels.operands import unsupported_linear
from jaxlora.pallas_kernels.projection import LinearShape, Projection
from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.row_function import RowArguments, RowFunction
from jaxlora.pallas_kernels.settings import RANK_STEP

# A warpgroup has at least one feature per thread, and holds three rows in registers,
# which spill with twice as many.
_LEAST_FEATURES, _MOST_FEATURES = 128, 8192


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


def unsupported_norm_gradient(
    h: jax.Array | jax.ShapeDtypeStruct, w: Any
) -> str | None:
    """Returns why the kernel of a norm's gradient does not run here; None if it does.

    Args:
        h: The rows that are normalized, or their shape.
        w: The frozen weight of a linear behind the norm, or None.
    """
    if (reason := unsupported_device()) is not None:
        return reason
    if isinstance(w, Fp8Weight):
        # With the kernel, a step of Llama-3.1-8B takes 0.5 % longer.
        return "XLA finds the row maxima for fp8 while it adds up the gradients"
    if h.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the rows are {h.dtype.name}, not bfloat16, float16 or float32"
    if h.ndim != 2 or not _LEAST_FEATURES <= h.shape[1] <= _MOST_FEATURES:
        wanted = f"[T, D] with D from {_LEAST_FEATURES} to {_MOST_FEATURES}"
        return f"the rows are {list(h.shape)}, not {wanted}"
    return None

"""Base weights as back ends read them: stacks, quantized or dequantized weights.

A dequantized copy lives only while one linear's product needs it. An optimization
barrier makes it depend on the input of that product. So XLA can neither dequantize many
weights in advance, nor keep the copy of the forward pass for the backward pass.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.typing import DTypeLike

from jaxlora.pallas_kernels.projection import Projection
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight


def readable_weights(
    projections: Sequence[Projection],
    rows: Sequence[jax.Array],
    dtype: DTypeLike,
    w_transposed: bool,
    *,
    is_backward: bool = False,
) -> tuple[tuple[Projection, ...], list[jax.Array], bool]:
    """Makes the base weights readable for a back end's pass.

    Args:
        projections: The linears, whose weights all have the same format.
        rows: x [T, K], or in the backward pass the gradient of each y, [T, N].
        dtype: Dtype of x.
        w_transposed: Whether weights that are not quantized are stored N K.
        is_backward: Whether it is the backward pass.

    Returns:
        The projections; the rows, which the product must read instead of the arguments;
        and whether the weights are now stored N K.
    """
    weights = [p.w for p in projections if isinstance(p.w, QuantizedWeight)]
    if not weights:
        return tuple(map(_with_stack, projections)), list(rows), w_transposed
    first = weights[0]
    reaches = first.reaches_backward_kernels if is_backward else first.reaches_kernels
    if reaches and not first.is_stack:
        return tuple(projections), list(rows), True
    weights, rows = jax.lax.optimization_barrier((weights, list(rows)))
    made = (_dequantized(w, dtype) for w in weights)
    pairs = zip(projections, made, strict=True)
    return tuple(dataclasses.replace(p, w=w) for p, w in pairs), rows, True


def _dequantized(w: QuantizedWeight, dtype: DTypeLike) -> jax.Array:
    """Returns the stack of a weight, or of the weights of all experts."""
    if w.is_stack:
        return jax.vmap(lambda one: one.dequantize(dtype))(w)
    return w.dequantize(dtype)[None]


def _with_stack(projection: Projection) -> Projection:
    """Makes w a stack of one weight if it is none."""
    w = projection.dense_w
    return dataclasses.replace(projection, w=w if w.ndim == 3 else w[None])

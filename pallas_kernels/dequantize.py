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


def forward_weights(
    projections: Sequence[Projection], x: jax.Array, w_transposed: bool
) -> tuple[tuple[Projection, ...], jax.Array, bool]:
    """Makes the base weights readable for `Backend.forward`.

    Args:
        projections: The linears, whose weights all have the same format.
        x: Token rows, [T, K].
        w_transposed: Whether weights that are not quantized are stored N K.

    Returns:
        The projections; x, which the product must read instead of the argument; and
        whether the weights are now stored N K.
    """
    weights = _quantized(projections)
    if not weights:
        return tuple(map(_with_stack, projections)), x, w_transposed
    if weights[0].reaches_kernels:
        return tuple(projections), x, True
    readable, (x,) = _dequantized(projections, weights, [x], x.dtype)
    return readable, x, True


def backward_weights(
    projections: Sequence[Projection],
    dy: Sequence[jax.Array],
    dtype: DTypeLike,
    w_transposed: bool,
) -> tuple[tuple[Projection, ...], list[jax.Array], bool]:
    """Makes the base weights readable for `Backend.backward`.

    Args:
        projections: The linears, whose weights all have the same format.
        dy: Gradient of each projection's y, [T, N].
        dtype: Dtype of x.
        w_transposed: Whether weights that are not quantized are stored N K.

    Returns:
        The projections; dy, which the product must read instead of the argument; and
        whether the weights are now stored N K.
    """
    weights = _quantized(projections)
    if not weights:
        return tuple(map(_with_stack, projections)), list(dy), w_transposed
    if weights[0].reaches_backward_kernels:
        return tuple(projections), list(dy), True
    return *_dequantized(projections, weights, dy, dtype), True


def _quantized(projections: Sequence[Projection]) -> list[QuantizedWeight]:
    return [p.w for p in projections if isinstance(p.w, QuantizedWeight)]


def _with_stack(projection: Projection) -> Projection:
    """Makes w a stack of one weight if it is none."""
    w = projection.dense_w
    return dataclasses.replace(projection, w=w if w.ndim == 3 else w[None])


def _dequantized(
    projections: Sequence[Projection],
    weights: Sequence[QuantizedWeight],
    rows: Sequence[jax.Array],
    dtype: DTypeLike,
) -> tuple[tuple[Projection, ...], list[jax.Array]]:
    """Dequantizes each weight into [1, N, K] once `rows` are computed."""
    weights, rows = jax.lax.optimization_barrier((list(weights), list(rows)))
    made = (w.dequantize(dtype)[None] for w in weights)
    pairs = zip(projections, made, strict=True)
    return tuple(dataclasses.replace(p, w=w) for p, w in pairs), rows

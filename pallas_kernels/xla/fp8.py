"""The products of an fp8 base in plain JAX: their definition, for any device.

The product of two e4m3 values is exact in float32, in which the sums are computed.
XLA uses the tensor cores of GPUs that have e4m3; elsewhere, it converts the operands.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.quantized.rows import quantize_rows, row_scale


def products(x: jax.Array, weights: Sequence[Fp8Weight]) -> list[jax.Array]:
    """Computes `x W^T` [T, N] in float32 for each weight, from x quantized by rows."""
    scale = row_scale(x)
    values = quantize_rows(x, scale)
    return [
        _einsum("tk,nk->tn", values, w.values) * w.scale * scale[:, None]
        for w in weights
    ]


def input_gradients(
    dy: Sequence[jax.Array], weights: Sequence[Fp8Weight]
) -> list[jax.Array]:
    """Computes each weight's part of dx [T, K] in float32, from quantized dy.

    The scales of the output features lie along this product's sum, so dy is multiplied
    by them before it is quantized. A row has one scale for all weights, so that kernels
    can sum the parts in one accumulator.
    """
    pairs = list(zip(dy, weights, strict=True))
    scale = functools.reduce(jnp.maximum, (row_scale(d, w.scale) for d, w in pairs))
    parts = []
    for d, w in pairs:
        values = quantize_rows(d, scale, w.scale)
        if w.transposed is None:
            part = _einsum("tn,nk->tk", values, w.values)
        else:
            part = _einsum("tn,kn->tk", values, w.transposed)
        parts.append(part * scale[:, None])
    return parts


def _einsum(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    # Where XLA converts w, it would otherwise convert the weights of all layers in
    # advance, and keep them for the backward pass.
    x, w = jax.lax.optimization_barrier((x, w))
    return jnp.einsum(spec, x, w, preferred_element_type=jnp.float32)

"""VeRA's tables of the slots: random matrices that all linears share.

VeRA (arXiv 2310.11454) adds `((x A) * d) B * b` to the output of a linear, where A and
B are frozen, and the vectors d and b are trained. That is LoRA with the matrices A d
and B b, so every back end runs it. Those are made in each pass and not kept: they are
as large as LoRA's, while an adapter trains and saves R + N numbers in a linear.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxlora.sharding.rules import TENSOR
from jaxlora.sharding.tensor import own_slice

Pair = tuple[Float[Array, "G K R"], Float[Array, "G R N"]]


def vera_pair(
    a: Float[Array, "G KMAX R"],
    b: Float[Array, "G R NMAX"],
    vector_d: Float[Array, "G R"],
    vector_b: Float[Array, "G N"],
    in_features: int,
    input_parts: int = 1,
    output_parts: int = 1,
) -> Pair:
    """Returns the matrices A and B of LoRA that a linear's VeRA is equal to.

    Which rows and columns of the shared matrices a device takes depends on the linear,
    so all devices have the whole matrices.

    Args:
        a: Shrink matrices of the slots.
        b: Expand matrices of the slots.
        vector_d: Trained factors of the ranks.
        vector_b: Trained factors of the output features.
        in_features: K of the linear, on this device.
        input_parts: Number of parts into which devices divide the input features.
        output_parts: Number of parts into which they divide the output features.
    """
    own_a = _own(a, 1, in_features, input_parts)
    own_b = _own(b, 2, vector_b.shape[1], output_parts)
    return own_a * vector_d[:, None], own_b * vector_b[:, None]


def _own(matrix: jax.Array, axis: int, size: int, parts: int) -> jax.Array:
    """Returns the first features of a matrix, or this device's part of them."""
    first = jax.lax.slice_in_dim(matrix, 0, size * parts, axis=axis)
    if parts == 1:
        return first
    return own_slice(first, axis, parts, jax.lax.axis_size(TENSOR))


def chosen_pair(is_used: Bool[Array, " G"], vera: Pair, lora: Pair) -> Pair:
    """Returns VeRA's matrices in the slots that have VeRA, and LoRA's in the others."""
    chosen = is_used[:, None, None]
    return jnp.where(chosen, vera[0], lora[0]), jnp.where(chosen, vera[1], lora[1])

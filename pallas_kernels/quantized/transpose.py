"""A transpose of one-byte values that moves words of four bytes."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float8e4m3fn

_BYTES = 4  # of a word


def transpose_e4m3(values: Float8e4m3fn[Array, "N K"]) -> Float8e4m3fn[Array, "K N"]:
    """Returns the transposed values; N and K are multiples of four.

    XLA's transpose of single bytes is slow on a GPU, where a thread moves four bytes in
    the time of one. So the four words that hold four by four values become their
    transpose, by shifts, and XLA transposes the matrix of words in the same kernel.

    Args:
        values: The values.
    """
    n, k = values.shape
    grouped = values.reshape(n // _BYTES, _BYTES, k // _BYTES, _BYTES)
    words = jax.lax.bitcast_convert_type(grouped, jnp.uint32)
    columns = jnp.stack([_column(words, j) for j in range(_BYTES)], axis=1)
    # The words are a matrix here, or XLA would transpose them as groups of bytes.
    turned = columns.transpose(2, 1, 0).reshape(k, n // _BYTES)
    return jax.lax.bitcast_convert_type(turned, values.dtype).reshape(k, n)


def _column(words: jax.Array, j: int) -> jax.Array:
    """Returns byte j of each of four words [_, 4, _] as one word [_, _]."""
    byte = (words >> jnp.uint32(8 * j)) & jnp.uint32(255)
    moved = (byte[:, i] << jnp.uint32(8 * i) for i in range(_BYTES))
    return functools.reduce(jnp.bitwise_or, moved)

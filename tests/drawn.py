"""Random arrays, drawn by NumPy.

JAX compiles a program for each shape and dtype that it draws, which takes longer than
many a test.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def normal(seed: int, shape: Sequence[int], dtype: DTypeLike = jnp.float32):
    """Draws an array from the normal distribution."""
    drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(drawn.astype(dtype))


class Draws:
    """Draws one array after another from the normal distribution."""

    def __init__(self, seed: int):
        """Begins with the first array."""
        self._rng = np.random.default_rng(seed)

    def normal(self, *shape: int, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Draws the next array."""
        drawn = self._rng.standard_normal(shape, np.float32)
        return jnp.asarray(drawn.astype(dtype))

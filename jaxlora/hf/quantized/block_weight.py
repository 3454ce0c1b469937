"""A weight in e4m3 with one scale per block, before it is requantized."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockWeight:
    """`W[n, k] = values[n, k] * scale[n / b0, k / b1]` with blocks of b0 by b1 values.

    Attributes:
        values: The e4m3 values.
        scale: Scale of each block; the blocks at the edges may be smaller.
        block: b0 and b1.
    """

    values: Float8e4m3fn[Array | np.ndarray, "N K"]
    scale: Float[Array | np.ndarray, "_ _"]
    block: tuple[int, int] = dataclasses.field(metadata={"static": True})

    def dequantize(self, dtype: DTypeLike) -> Float[Array, "N K"]:
        """Returns W, computed in float32 and rounded once to `dtype`."""
        n, k = self.values.shape
        rows = jnp.repeat(self.scale, self.block[0], axis=0)[:n]
        scale = jnp.repeat(rows, self.block[1], axis=1)[:, :k]
        return (jnp.asarray(self.values).astype(jnp.float32) * scale).astype(dtype)

"""The common part of formats with one scale per output feature."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight


@typing.no_type_check  # JAX also builds its formats from leaves that are not arrays
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowScaledWeight(QuantizedWeight):
    """`W[n, k] = values[n, k] * scale[n]`; the formats have both as fields."""

    dimensions = {"values": ("N", "K"), "scale": ("N",)}

    values: jax.Array
    scale: jax.Array

    def dequantize(self, dtype: DTypeLike) -> jax.Array:
        """Returns W [N, K], computed in float32 and rounded once to `dtype`."""
        w = self.values.astype(jnp.float32) * self.scale[:, None]
        return w.astype(dtype)

    @property
    def in_features(self) -> int:
        """K."""
        return self.values.shape[1]

    @property
    def out_features(self) -> int:
        """N."""
        return self.values.shape[0]

"""Quantization by rows: to e4m3, and formats of weights with one scale per row.

A row's scale follows from that row alone. So the values of other rows, which may belong
to other adapters, change no bit of it.
"""

import dataclasses
import typing
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn

from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight

E4M3 = jnp.float8_e4m3fn
E4M3_MAX = float(jnp.finfo(E4M3).max)  # 448
SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)


def row_scale(
    x: Float[Array, "T K"],
    factor: Float[Array, " K"] | None = None,
    *,
    smallest: float = SMALLEST_SCALE,
) -> Float[Array, " T"]:
    """Returns `max_k |x[t, k] * factor[k]| * (1 / 448)`, computed in float32.

    A row that contains NaN has the scale NaN, and one with an infinity has infinity.

    Args:
        x: Rows to quantize.
        factor: Factor of each column; None: 1.
        smallest: The smallest scale, so that a row of zeros can be divided by it.
    """
    largest = jnp.abs(_scaled(x, factor)).max(axis=1)
    # XLA turns some divisions by a constant into products; this is one everywhere.
    return jnp.maximum(largest * (1 / E4M3_MAX), smallest)


def quantize_rows(
    x: Float[Array, "T K"],
    scale: Float[Array, " T"],
    factor: Float[Array, " K"] | None = None,
) -> Float8e4m3fn[Array, "T K"]:
    """Returns `e4m3(x[t, k] * factor[k] * (1 / scale[t]))`, computed in float32.

    It rounds to nearest even. Values beyond 448 become 448, as a product may exceed it
    by a rounding error.

    Args:
        x: Rows to quantize.
        scale: Scale of each row; see `row_scale`.
        factor: Factor of each column; None: 1.
    """
    scaled = _scaled(x, factor) * (1 / scale)[:, None]
    values = jnp.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(E4M3)
    # For GPUs, XLA leaves out a rounding whose result is converted back to float32.
    return jax.lax.optimization_barrier(values)


def _scaled(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    x = x.astype(jnp.float32)
    return x if factor is None else x * factor


@typing.no_type_check  # JAX also builds its formats from leaves that are not arrays
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowScaledWeight(QuantizedWeight):
    """`W[n, k] = values[n, k] * scale[n]`; the formats have both as fields.

    Attributes:
        values: The values.
        scale: Scale of each output feature.
        dtype: Dtype of the values.
    """

    dtype: ClassVar[DTypeLike]
    dimensions = {"values": ("N", "K"), "scale": ("N",)}

    values: jax.Array
    scale: jax.Array

    def dequantize(self, dtype: DTypeLike) -> jax.Array:
        """Returns W [N, K], computed in float32 and rounded once to `dtype`."""
        w = self.values.astype(jnp.float32) * self.scale[:, None]
        return w.astype(dtype)

    @classmethod
    def shapes(
        cls, out_features: int, in_features: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """See `QuantizedWeight.shapes`."""
        return {
            "values": jax.ShapeDtypeStruct((out_features, in_features), cls.dtype),
            "scale": jax.ShapeDtypeStruct((out_features,), jnp.float32),
        }

    def _own_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self.shapes(*self.values.shape)

    @property
    def in_features(self) -> int:
        """K."""
        return self.values.shape[1]

    @property
    def out_features(self) -> int:
        """N."""
        return self.values.shape[0]

"""Weights in int8 with one scale per output feature."""

import dataclasses
import typing
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

from jaxlora.pallas_kernels.quantized.rows import SMALLEST_SCALE, RowScaledWeight
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight, WeightOptions

_LARGEST = 127  # values are symmetric: -128 is not used


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Weight(RowScaledWeight):
    """`W[n, k] = values[n, k] * scale[n]`.

    Attributes:
        values: The integers, from -127 to 127.
        scale: Scale of each output feature.
    """

    format: ClassVar[str] = "int8"
    dtype: ClassVar[DTypeLike] = jnp.int8

    values: Int8[Array, "N K"]
    scale: Float[Array, " N"]

    @classmethod
    def quantize(cls, w: Float[Array, "N K"]) -> "Int8Weight":
        """Quantizes a weight; the largest value of an output feature becomes 127.

        Values are rounded to nearest even, so their error is at most half a scale.

        Args:
            w: The weight, of any float dtype.
        """
        w = w.astype(jnp.float32)
        scale = jnp.maximum(jnp.abs(w).max(axis=1) * (1 / _LARGEST), SMALLEST_SCALE)
        values = jnp.round(w * (1 / scale)[:, None])
        values = jnp.clip(values, -_LARGEST, _LARGEST).astype(jnp.int8)
        return cls(values=values, scale=scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Options(WeightOptions):
    """`Int8Weight` has no options."""

    weight: ClassVar[type[QuantizedWeight]] = Int8Weight

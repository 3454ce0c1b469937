"""Weights in MXFP4, as gpt-oss stores its experts: e2m1 with a scale for each 32."""

import dataclasses
import typing
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight, WeightOptions

BLOCK = 32  # values that share a scale
# The magnitudes of e2m1; the fourth bit is the sign.
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_BIAS = 127  # of a scale's exponent
_LARGEST_EXPONENT = 2  # of e2m1


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mxfp4Weight(QuantizedWeight):
    """`W[n, k] = E2M1[code[n, k]] * 2**(scale[n, k / 32] - 127)`, two codes per byte.

    Values have two significant bits, so bfloat16 holds them as they are, unless a scale
    is near the ends of its range.

    Attributes:
        values: Codes of two neighbors along K; the first is in the low four bits.
        scale: Exponent of each block of 32 values.

    References:
        OCP Microscaling Formats (MX) Specification, version 1.0, sections 5.3 and 6.3.
    """

    format: ClassVar[str] = "mxfp4"
    dimensions = {"values": ("N", "K"), "scale": ("N", "K")}

    values: UInt8[Array, "N _"]
    scale: UInt8[Array, "N _"]

    @classmethod
    def quantize(cls, w: Float[Array, "N K"]) -> "Mxfp4Weight":
        """Quantizes a weight; values are rounded to nearest even, and at most 6.

        Args:
            w: The weight, of any float dtype; K is a multiple of 32.

        Raises:
            ValueError: K is not a multiple of 32.
        """
        _check_in_features(w.shape[1])
        blocks = w.astype(jnp.float32).reshape(w.shape[0], -1, BLOCK)
        _, exponent = jnp.frexp(jnp.abs(blocks).max(axis=2))
        scale = jnp.clip(exponent - 1 - _LARGEST_EXPONENT + _BIAS, 0, 254)
        scaled = blocks * _power(_BIAS - scale)[:, :, None]
        code = _nearest(jnp.abs(scaled)) | (jnp.signbit(scaled) << 3).astype(jnp.uint8)
        pairs = code.reshape(w.shape[0], -1, 2)
        return cls(
            values=pairs[:, :, 1] << 4 | pairs[:, :, 0], scale=scale.astype(jnp.uint8)
        )

    def dequantize(self, dtype: DTypeLike) -> Float[Array, "N K"]:
        """Returns W, computed in float32 and rounded once to `dtype`."""
        odd = jnp.arange(self.in_features, dtype=jnp.uint8) & 1
        # Both neighbors read their byte, so that no halves have to be interleaved.
        code = jnp.repeat(self.values, 2, axis=1) >> (4 * odd)
        magnitude = jnp.asarray(E2M1).at[code & 7].get(mode="promise_in_bounds")
        power = _power(self.scale.astype(jnp.int32) - _BIAS)
        value = magnitude * jnp.repeat(power, BLOCK, axis=1)
        return jnp.where(code & 8 != 0, -value, value).astype(dtype)

    @classmethod
    def shapes(
        cls, out_features: int, in_features: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """See `QuantizedWeight.shapes`; K is a multiple of 32."""
        n, k = out_features, in_features
        _check_in_features(k)
        return {
            "values": jax.ShapeDtypeStruct((n, k // 2), jnp.uint8),
            "scale": jax.ShapeDtypeStruct((n, k // BLOCK), jnp.uint8),
        }

    @property
    def in_features(self) -> int:
        """K."""
        return 2 * self.values.shape[1]

    @property
    def out_features(self) -> int:
        """N."""
        return self.values.shape[0]

    def _own_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self.shapes(self.out_features, self.in_features)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mxfp4Options(WeightOptions):
    """`Mxfp4Weight` has no options."""

    weight: ClassVar[type[QuantizedWeight]] = Mxfp4Weight


def _power(exponent):
    """Returns 2 to integers from -127 to 127, exactly."""
    bits = jnp.maximum(exponent + _BIAS, 1) << 23
    power = jax.lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)
    return jnp.where(exponent > -_BIAS, power, power / 2)


def _nearest(magnitude: Float[Array, "*B"]) -> UInt8[Array, "*B"]:
    """Returns the code nearest to each magnitude; of two, the even one."""
    middle, number = (E2M1[:-1] + E2M1[1:]) / 2, np.arange(len(E2M1) - 1)
    x = magnitude[..., None]
    is_above = jnp.where(number % 2 == 0, x > middle, x >= middle)
    return jnp.sum(is_above, axis=-1, dtype=jnp.uint8)


def _check_in_features(in_features: int) -> None:
    if in_features % BLOCK:
        raise ValueError(
            f"mxfp4 has blocks of {BLOCK} values along K, but K={in_features} is not a "
            "multiple. Keep this linear unquantized, or use int8 or fp8."
        )

"""Weights in NF4 with double quantization, as bitsandbytes stores them."""

import dataclasses
import typing
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxlora.pallas_kernels.quantized.rows import SMALLEST_SCALE
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight, WeightOptions

BLOCK = 64  # values that share one absmax
NESTED_BLOCK = 256  # absmax that share one nested absmax, in row-major order

# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero.
# QLoRA, arXiv 2305.14314, appendix E.
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)


def _dynamic_values() -> np.ndarray:
    """Returns the signed 8-bit dynamic map in ascending order.

    Decade i of seven, `10**(i-7)` to `10**(i-6)`, holds the centers of `2**i` equal
    intervals, with both signs. 0 and 1 complete the 256 values.

    References:
        Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv
        2110.02861, section 2.2.
    """
    positive = [
        10.0 ** (i - 6) * (0.1 + 0.9 * (np.arange(2**i) + 0.5) / 2**i) for i in range(7)
    ]
    flat = np.concatenate(positive)
    return np.sort(np.concatenate([-flat, flat, [0.0, 1.0]])).astype(np.float32)


DYNAMIC = _dynamic_values()


def nearest(codebook: np.ndarray, x: Float[Array, "*B"]) -> UInt8[Array, "*B"]:
    """Returns the index of the value nearest to each x; a tie goes to the lower one.

    Args:
        codebook: Values in ascending order.
        x: Numbers to quantize.
    """
    middle = (codebook[:-1] + codebook[1:]) / 2
    # XLA fuses this, whereas a binary search would hold positions for all of x.
    return jnp.sum(x[..., None] > middle, axis=-1, dtype=jnp.uint8)


def _look_up(codebook: np.ndarray, index: UInt8[Array, "*B"]) -> Float[Array, "*B"]:
    """Returns the value at each index. Indices must be below the codebook's length."""
    return jnp.asarray(codebook).at[index].get(mode="promise_in_bounds")


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Nf4Weight(QuantizedWeight):
    """`W[n, k] = NF4[code[n, k]] * absmax[n, k / 64]`, with two codes per byte.

    With double quantization, absmax is quantized itself: block i, in row-major order,
    has `DYNAMIC[absmax[i]] * nested_absmax[i / 256] + nested_offset`. Checkpoints
    without it have absmax in float32.

    Attributes:
        values: Codes of two neighbors along K; the first is in the high four bits.
        absmax: Largest magnitude of each block of 64 values, as a code of the dynamic
            map; or in float32 if there is no double quantization.
        nested_absmax: Largest magnitude of each block of 256 absmax, less the offset;
            None without double quantization.
        nested_offset: Mean of absmax; None without double quantization.

    References:
        QLoRA, arXiv 2305.14314, section 3.
    """

    format: ClassVar[str] = "nf4"
    dimensions = {
        **{"values": ("N", "K"), "absmax": ("N", "K")},
        **{"nested_absmax": (), "nested_offset": ()},
    }

    values: UInt8[Array, "N _"]
    absmax: UInt8[Array, "N _"] | Float[Array, "N _"]
    nested_absmax: Float[Array, " _"] | None = None
    nested_offset: Float[Array, ""] | None = None

    @classmethod
    def quantize(cls, w: Float[Array, "N K"]) -> "Nf4Weight":
        """Quantizes a weight with double quantization.

        Args:
            w: The weight, of any float dtype; K is a multiple of 64.

        Raises:
            ValueError: K is not a multiple of 64.
        """
        _check_in_features(w.shape[1])
        blocks = w.astype(jnp.float32).reshape(w.shape[0], -1, BLOCK)
        absmax = jnp.abs(blocks).max(axis=2)
        scaled = blocks * (1 / jnp.maximum(absmax, SMALLEST_SCALE))[:, :, None]
        code = nearest(NF4, scaled).reshape(w.shape[0], -1, 2)
        offset = absmax.mean()
        nested_code, nested_absmax = _quantize_nested(absmax - offset)
        return cls(
            values=code[:, :, 0] << 4 | code[:, :, 1],
            absmax=nested_code,
            nested_absmax=nested_absmax,
            nested_offset=offset,
        )

    def dequantize(self, dtype: DTypeLike) -> Float[Array, "N K"]:
        """Returns W, computed in float32 and rounded once to `dtype`."""
        odd = jnp.arange(self.in_features, dtype=jnp.uint8) & 1
        # Both neighbors read their byte, so that no halves have to be interleaved.
        code = jnp.repeat(self.values, 2, axis=1) >> (4 - 4 * odd) & 15
        absmax = jnp.repeat(self._absmax(), BLOCK, axis=1)
        return (_look_up(NF4, code) * absmax).astype(dtype)

    def _absmax(self) -> Float[Array, "N _"]:
        if self.nested_absmax is None or self.nested_offset is None:
            return self.absmax
        nested = jnp.repeat(self.nested_absmax, NESTED_BLOCK)[: self.absmax.size]
        code = _look_up(DYNAMIC, self.absmax)
        return code * nested.reshape(code.shape) + self.nested_offset

    @classmethod
    def shapes(
        cls, out_features: int, in_features: int, *, double_quant: bool = True
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of each array, by field name.

        Args:
            out_features: N.
            in_features: K, a multiple of 64.
            double_quant: Whether the scales are quantized, too.

        Raises:
            ValueError: K is not a multiple of 64.
        """
        n, k = out_features, in_features
        _check_in_features(k)
        shapes = {"values": jax.ShapeDtypeStruct((n, k // 2), jnp.uint8)}
        if not double_quant:
            return shapes | {
                "absmax": jax.ShapeDtypeStruct((n, k // BLOCK), jnp.float32)
            }
        num_nested = -(-n * (k // BLOCK) // NESTED_BLOCK)
        return shapes | {
            "absmax": jax.ShapeDtypeStruct((n, k // BLOCK), jnp.uint8),
            "nested_absmax": jax.ShapeDtypeStruct((num_nested,), jnp.float32),
            "nested_offset": jax.ShapeDtypeStruct((), jnp.float32),
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
        is_double = self.nested_absmax is not None or self.nested_offset is not None
        n, k = self.out_features, self.in_features
        return self.shapes(n, k, double_quant=is_double)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nf4Options(WeightOptions):
    """Options of `Nf4Weight`.

    Attributes:
        double_quant: Whether the scales are quantized, too. Weights that are quantized
            here always have such scales; those of a checkpoint may not.
    """

    weight: ClassVar[type[QuantizedWeight]] = Nf4Weight

    double_quant: bool = True

    def shapes(
        self, out_features: int, in_features: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """See `Nf4Weight.shapes`."""
        n, k = out_features, in_features
        return Nf4Weight.shapes(n, k, double_quant=self.double_quant)


def _check_in_features(in_features: int) -> None:
    if in_features % BLOCK:
        raise ValueError(
            f"nf4 has blocks of {BLOCK} values along K, but K={in_features} is not a "
            "multiple. Keep this linear unquantized, or use int8 or fp8."
        )


def _quantize_nested(
    absmax: Float[Array, "N M"],
) -> tuple[UInt8[Array, "N M"], Float[Array, " _"]]:
    """Quantizes the absmax, less their mean, by blocks of 256 in row-major order."""
    flat = absmax.reshape(-1)
    blocks = jnp.pad(flat, (0, -flat.size % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    largest = jnp.abs(blocks).max(axis=1)
    scaled = blocks * (1 / jnp.maximum(largest, SMALLEST_SCALE))[:, None]
    code = nearest(DYNAMIC, scaled).reshape(-1)[: flat.size]
    return code.reshape(absmax.shape), largest

"""Weights in e4m3 with one scale per output feature."""

import dataclasses
import typing
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn

from jaxlora.pallas_kernels.quantized.row_scaled import RowScaledWeight
from jaxlora.pallas_kernels.quantized.rows import E4M3, quantize_rows, row_scale

# Kernels divide B by these scales. So the scale of an output feature whose weights are
# all zero must not be so small that the quotient overflows.
SMALLEST_WEIGHT_SCALE = 2.0**-64


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Weight(RowScaledWeight):
    """`W[n, k] = values[n, k] * scale[n]`.

    Attributes:
        values: The e4m3 values.
        scale: Scale of each output feature; positive.
        transposed: A second copy of the values for the gradient of x, whose product
            reads W along N; None: the values are transposed in each backward pass.
        fp8_backward: Whether the gradient of x is a product in e4m3. If not, its
            product is in x's dtype, with the dequantized weight.
    """

    format: ClassVar[str] = "fp8"
    reaches_kernels: ClassVar[bool] = True

    values: Float8e4m3fn[Array, "N K"]
    scale: Float[Array, " N"]
    transposed: Float8e4m3fn[Array, "K N"] | None = None
    fp8_backward: bool = dataclasses.field(default=True, metadata={"static": True})

    @classmethod
    def quantize(
        cls,
        w: Float[Array, "N K"],
        *,
        transposed: bool = False,
        fp8_backward: bool = True,
    ) -> "Fp8Weight":
        """Quantizes a weight; the largest value of an output feature becomes 448.

        Args:
            w: The weight, of any float dtype.
            transposed: Whether to keep a second, transposed copy.
            fp8_backward: See the class.
        """
        scale = row_scale(w, smallest=SMALLEST_WEIGHT_SCALE)
        values = quantize_rows(w, scale)
        return cls(
            values=values,
            scale=scale,
            transposed=values.T if transposed else None,
            fp8_backward=fp8_backward,
        )

    @classmethod
    def shapes(
        cls, out_features: int, in_features: int, *, transposed: bool = False
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of each array, by field name.

        Args:
            out_features: N.
            in_features: K.
            transposed: Whether there is a transposed copy.
        """
        n, k = out_features, in_features
        shapes = {
            "values": jax.ShapeDtypeStruct((n, k), E4M3),
            "scale": jax.ShapeDtypeStruct((n,), jnp.float32),
        }
        if transposed:
            shapes["transposed"] = jax.ShapeDtypeStruct((k, n), E4M3)
        return shapes

    def _own_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self.shapes(*self.values.shape, transposed=self.transposed is not None)

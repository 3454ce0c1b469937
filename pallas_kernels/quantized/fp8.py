"""Weights in e4m3 with one scale per output feature."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn

from jaxlora.pallas_kernels.quantized.row_scaled import RowScaledWeight
from jaxlora.pallas_kernels.quantized.rows import E4M3, quantize_rows, row_scale
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight, WeightOptions

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Options(WeightOptions):
    """Options of `Fp8Weight`.

    Attributes:
        transposed: Whether each weight has a transposed copy.
        fp8_backward: Whether the gradient of x is a product in e4m3.
    """

    weight: ClassVar[type[QuantizedWeight]] = Fp8Weight

    transposed: bool = False
    fp8_backward: bool = True

    @property
    def multiplies_forward(self) -> bool:
        """Whether kernels multiply e4m3; always true of this format."""
        return True

    @property
    def multiplies_backward(self) -> bool:
        """Whether kernels also multiply e4m3 in the backward pass."""
        return self.fp8_backward

    @property
    def stores_transpose(self) -> bool:
        """Whether a transposed copy of the values is stored."""
        return self.transposed

    def shapes(
        self, out_features: int, in_features: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """See `Fp8Weight.shapes`."""
        return Fp8Weight.shapes(out_features, in_features, transposed=self.transposed)

    def quantize(self, w: Float[Array, "N K"]) -> Fp8Weight:
        """See `Fp8Weight.quantize`."""
        return Fp8Weight.quantize(
            w, transposed=self.transposed, fp8_backward=self.fp8_backward
        )

    def make(self, arrays: Mapping[str, Any]) -> Fp8Weight:
        """Returns the weight of these arrays, by field."""
        return Fp8Weight(**arrays, fp8_backward=self.fp8_backward)

    def complete(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Adds the transposed copy if there is to be one."""
        if not self.transposed or "transposed" in arrays:
            return dict(arrays)
        return {**arrays, "transposed": arrays["values"].T}

    def result_settings(self) -> dict[str, Any]:
        """A copy of the weights changes no result."""
        return {"fp8_backward": self.fp8_backward}

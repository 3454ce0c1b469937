"""Weights in e4m3 with one scale per output feature."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn

from jaxlora.pallas_kernels.quantized.rows import (
    E4M3,
    RowScaledWeight,
    quantize_rows,
    row_scale,
)
from jaxlora.pallas_kernels.quantized.weight import (
    QuantizedWeight,
    WeightOptions,
    setting,
)


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
    dtype: ClassVar[DTypeLike] = E4M3
    dimensions = {**RowScaledWeight.dimensions, "transposed": ("K", "N")}
    reaches_kernels: ClassVar[bool] = True
    # Kernels divide B by these scales. So the scale of an output feature whose weights
    # are all zero must not be so small that the quotient overflows.
    smallest_scale: ClassVar[float] = 2.0**-64

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
        scale = row_scale(w, smallest=cls.smallest_scale)
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
        """See `QuantizedWeight.shapes`; `transposed` adds the transposed copy."""
        n, k = out_features, in_features
        more = {"transposed": jax.ShapeDtypeStruct((k, n), E4M3)} if transposed else {}
        return super().shapes(n, k) | more

    @property
    def reaches_backward_kernels(self) -> bool:
        """See `fp8_backward`."""
        return self.fp8_backward

    def _own_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self.shapes(*self.values.shape, transposed=self.transposed is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Options(WeightOptions):
    """Options of `Fp8Weight`.

    Attributes:
        fp8_backward: Whether the gradient of x is a product in e4m3.
        weight_copies: 2 adds the transpose of each weight, which the gradient of x
            multiplies with; with 1, it is made again in each backward pass. `auto` is 2
            if memory allows, and 1 until that is known.
    """

    weight: ClassVar[type[QuantizedWeight]] = Fp8Weight

    fp8_backward: bool = setting(True, values=(True, False))
    weight_copies: Literal["auto", 1, 2] = setting("auto", values=("auto", 1, 2))

    def __post_init__(self) -> None:
        """Checks that each copy of the weights is read."""
        if self.stores_transpose and not self.fp8_backward:
            raise ValueError(
                "weight_copies=2 stores a copy for an fp8 product that `fp8_backward: "
                "false` does not compute. Leave one of them out"
            )

    def storage_choices(self) -> tuple["Fp8Options", ...]:
        """Returns the options with one and with two copies, while that is open."""
        if self.weight_copies != "auto":
            return (self,)
        one = dataclasses.replace(self, weight_copies=1)
        if not self.fp8_backward:
            return (one,)
        return one, dataclasses.replace(self, weight_copies=2)

    def of_experts(self) -> "Fp8Options":
        """Returns the options with one copy, as no product reads the transpose."""
        return dataclasses.replace(self, weight_copies=1)

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
        return self.weight_copies == 2

    def shapes(
        self, out_features: int, in_features: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """See `Fp8Weight.shapes`."""
        return Fp8Weight.shapes(
            out_features, in_features, transposed=self.stores_transpose
        )

    def quantize(self, w: Float[Array, "N K"]) -> Fp8Weight:
        """See `Fp8Weight.quantize`."""
        return Fp8Weight.quantize(
            w, transposed=self.stores_transpose, fp8_backward=self.fp8_backward
        )

    def make(self, arrays: Mapping[str, Any]) -> Fp8Weight:
        """Returns the weight of these arrays, by field."""
        return Fp8Weight(**arrays, fp8_backward=self.fp8_backward)

    def complete(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Adds the transposed copy, or leaves it out."""
        own = {k: v for k, v in arrays.items() if k != "transposed"}
        if not self.stores_transpose:
            return own
        return own | {"transposed": arrays.get("transposed", arrays["values"].T)}

    def result_settings(self) -> dict[str, Any]:
        """A copy of the weights changes no result."""
        return {"fp8_backward": self.fp8_backward}

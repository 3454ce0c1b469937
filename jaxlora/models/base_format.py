"""How the linears of a decoder with a quantized base store their weights."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxlora.pallas_kernels import FORMATS, Fp8Weight, Nf4Weight, QuantizedWeight


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BaseFormat:
    """The format of the quantized linears of a decoder.

    Attributes:
        name: Its name in `pallas_kernels.FORMATS`.
        kept: Paths of the linears that are not quantized.
        fp8_backward: Whether gradients of inputs are fp8 products; fp8 only.
        transposed: Whether there is a transposed copy of each weight; fp8 only.
        nested: Whether the scales are quantized, too; nf4 only.
    """

    name: str
    kept: tuple[str, ...] = ()
    fp8_backward: bool = True
    transposed: bool = False
    nested: bool = True

    def quantizes(self, path: str) -> bool:
        """Returns whether the linear of this path is quantized."""
        return path not in self.kept

    def shapes(
        self, out_features: int, in_features: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of each array of a weight [N, K], by field."""
        options: dict[str, Any] = {}
        if self.name == Fp8Weight.format:
            options["transposed"] = self.transposed
        if self.name == Nf4Weight.format:
            options["nested"] = self.nested
        return FORMATS[self.name].shapes(out_features, in_features, **options)

    @property
    def fields(self) -> list[str]:
        """Names of all fields of a weight, some of which may be no arrays."""
        kind: Any = FORMATS[self.name]
        return [field.name for field in dataclasses.fields(kind)]

    def empty(self, out_features: int, in_features: int) -> QuantizedWeight:
        """Returns a weight [N, K] whose arrays are zeros, to be replaced."""
        shapes = self.shapes(out_features, in_features)
        return self.weight({k: jnp.zeros(s.shape, s.dtype) for k, s in shapes.items()})

    def weight(self, arrays: dict[str, Any]) -> QuantizedWeight:
        """Returns the weight of these arrays, by field."""
        settings: dict[str, Any] = {}
        if self.name == Fp8Weight.format:
            settings["fp8_backward"] = self.fp8_backward
        kind: Any = FORMATS[self.name]
        return kind(**arrays, **settings)

    @property
    def has_fp8_products(self) -> bool:
        """Whether weights are multiplied in fp8, and not only dequantized."""
        return self.name == Fp8Weight.format


def kernel_of(
    params: Mapping[str, Any], path: str, base_format: BaseFormat | None
) -> Any:
    """Returns the frozen weight of a linear, or its `QuantizedWeight`; both have K N.

    Args:
        params: Frozen weights, or their shapes, by path.
        path: Path of the linear's kernel.
        base_format: How linears are quantized; None: they are not.
    """
    if path in params:
        return params[path]
    assert base_format is not None
    paths = {field: f"{path}.{field}" for field in base_format.fields}
    found = {field: params[p] for field, p in paths.items() if p in params}
    return base_format.weight(found)

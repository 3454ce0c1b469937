"""The storage format of the linears in a decoder with a quantized base."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxlora.models.config import shared_path
from jaxlora.pallas_kernels import OPTIONS, QuantizedWeight, WeightOptions


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BaseFormat:
    """The format of the quantized linears of a decoder.

    Attributes:
        options: The format, with its options.
        kept: Paths of the linears that are not quantized.
    """

    options: WeightOptions
    kept: tuple[str, ...] = ()

    @staticmethod
    def named(name: str, *, kept: tuple[str, ...] = (), **options: Any) -> "BaseFormat":
        """Returns a format by its name in `pallas_kernels.FORMATS`."""
        return BaseFormat(options=OPTIONS[name](**options), kept=kept)

    @property
    def name(self) -> str:
        """Its name in `pallas_kernels.FORMATS`."""
        return self.options.weight.format

    def quantizes(self, path: str) -> bool:
        """Returns whether the linear of this path is quantized."""
        return shared_path(path) not in self.kept

    def options_of(self, path: str) -> WeightOptions:
        """Returns the options of the linear of this path, or of its kernel."""
        return self.options.of_experts() if ".experts." in path else self.options

    def shapes(
        self, out_features: int, in_features: int, num_experts: int | None = None
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of each array of a weight [N, K], by field.

        Args:
            out_features: N.
            in_features: K.
            num_experts: X: each array of a stack of experts' weights has a first axis
                of X. None: it is one weight.
        """
        if num_experts is None:
            return self.options.shapes(out_features, in_features)
        each = self.options.of_experts().shapes(out_features, in_features)
        return {
            field: jax.ShapeDtypeStruct((num_experts, *one.shape), one.dtype)
            for field, one in each.items()
        }

    @property
    def fields(self) -> list[str]:
        """Names of all fields of a weight, some of which may be no arrays."""
        kind: Any = self.options.weight
        return [field.name for field in dataclasses.fields(kind)]

    def empty(
        self, out_features: int, in_features: int, num_experts: int | None = None
    ) -> QuantizedWeight:
        """Returns a weight whose arrays are zeros, to be replaced; see `shapes`."""
        shapes = self.shapes(out_features, in_features, num_experts)
        return self.weight({k: jnp.zeros(s.shape, s.dtype) for k, s in shapes.items()})

    def weight(self, arrays: Mapping[str, Any]) -> QuantizedWeight:
        """Returns the weight of these arrays, by field."""
        return self.options.make(arrays)


def kernel_of(
    params: Mapping[str, Any], path: str, base_format: BaseFormat | None
) -> Any:
    """Returns the frozen weight of a linear, or its `QuantizedWeight`; both have K N.

    That of an expert is part of an array, and only its shape and dtype are returned:
    nothing that is trained on experts starts from their weights.

    Args:
        params: Frozen weights, or their shapes, by path.
        path: Path of the linear's kernel.
        base_format: How linears are quantized; None: they are not.
    """
    if path in params:
        return params[path]
    if (shared := shared_path(path)) in params:
        stacked = params[shared]
        return jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)
    assert base_format is not None
    paths = {field: f"{shared}.{field}" for field in base_format.fields}
    found = {field: params[p] for field, p in paths.items() if p in params}
    if shared != path:
        found = {
            field: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
            for field, x in found.items()
        }
    return base_format.weight(found)

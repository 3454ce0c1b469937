"""The kinds of Flax variables that are not trained."""

import dataclasses
from typing import Any

from flax import nnx


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightLayout:
    """How a checkpoint names a frozen weight, and how devices divide it.

    It is metadata of the variable. It does not say in which layer the weight is,
    because layers whose variables are equal share their traces.

    Attributes:
        hf_name: Name in Hugging Face's checkpoints; of a weight of a layer, the part
            after the layer's name. The name of a quantized weight is that of the dense
            one.
        shape: Shape of the whole weight, as it is here.
        dimensions: Letter of each dimension, see docs/conventions.md.
        transpose: Whether the checkpoint holds the transpose.
        divided: The dimension that the axis `tensor` of a mesh divides; None: each of
            its devices has the whole weight.
        by_heads: Whether that dimension is one of key-value heads. If there are fewer
            heads than devices, each device has the whole weight and uses one head.
        sections: Proportions of the sections of that dimension. If there are several,
            each device has the whole weight and uses a part of each section.
        gathered: Dimensions that the axis `fsdp` may divide, the preferred one first.
        expert_dim: The dimension that the axis `expert` divides; None: it divides none.
    """

    hf_name: str
    shape: tuple[int, ...]
    dimensions: tuple[str, ...]
    transpose: bool = False
    divided: str | None = None
    by_heads: bool = False
    sections: tuple[int, ...] = (1,)
    gathered: tuple[int, ...] = (0, 1)
    expert_dim: int | None = None

    @property
    def tensor_dim(self) -> int | None:
        """Number of the dimension that `tensor` divides; None: it divides none."""
        if self.divided is None or self.divided not in self.dimensions:
            return None
        return self.dimensions.index(self.divided)


class BaseParam(nnx.Param):
    """A frozen weight of the base model; a decoder's has a `WeightLayout`."""


def with_layout(variable: BaseParam, **layout: Any) -> BaseParam:
    """Gives a new weight its layout, and returns it.

    Args:
        variable: The weight.
        **layout: Fields of `WeightLayout`, except its shape.
    """
    variable.set_metadata("layout", WeightLayout(shape=tuple(variable.shape), **layout))
    return variable


class SlotVariable(nnx.Variable):
    """A setting of each slot: data to the compiled step, never trained."""

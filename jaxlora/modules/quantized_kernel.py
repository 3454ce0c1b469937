"""The frozen weight of a linear in a quantized format, as a Flax module."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxlora.modules.base_param import BaseParam
from jaxlora.pallas_kernels import QuantizedWeight


class QuantizedKernel(nnx.Module):
    """The kernel of a linear whose frozen weight is quantized.

    Each array of the weight is a `BaseParam` under the name of its field, such as
    `values` and `scale`. Optional arrays that the weight lacks are None.
    """

    def __init__(self, weight: QuantizedWeight):
        """Takes over the arrays of a weight [N, K]."""
        self._kind = type(weight)
        arrays = weight.arrays
        for field in dataclasses.fields(weight):  # pyrefly: ignore[bad-argument-type]
            name = field.name
            value = getattr(weight, name)
            setattr(self, name, BaseParam(value) if name in arrays else value)

    @property
    def weight(self) -> QuantizedWeight:
        """The weight, as the ops of `jaxlora.pallas_kernels` take it."""
        fields = dataclasses.fields(self._kind)  # pyrefly: ignore[bad-argument-type]
        values = {field.name: getattr(self, field.name) for field in fields}
        return self._kind(
            **{
                name: value[...] if isinstance(value, BaseParam) else value
                for name, value in values.items()
            }
        )


def as_dense(
    weight: jax.Array | np.ndarray | QuantizedWeight, dtype: DTypeLike
) -> jax.Array:
    """Returns a frozen weight as K N in the dtype of the products."""
    if isinstance(weight, QuantizedWeight):
        return weight.dequantize(dtype).T
    return jnp.asarray(weight, dtype)


def make_kernel(
    kernel: QuantizedWeight | None,
    shape: tuple[int, int],
    dtype: DTypeLike,
    rngs: nnx.Rngs | None,
) -> BaseParam | QuantizedKernel:
    """Makes the kernel of a linear.

    Args:
        kernel: Quantized weight; None: the kernel is random.
        shape: K and N.
        dtype: Dtype of a random kernel.
        rngs: Source of a random kernel.

    Raises:
        ValueError: The quantized weight has another shape, or there is neither a
            quantized weight nor `rngs`.
    """
    if kernel is None:
        if rngs is None:
            raise ValueError("give rngs for a random kernel, or a quantized kernel.")
        init = nnx.initializers.lecun_normal()
        return BaseParam(init(rngs.params(), shape, dtype))
    if kernel.shape != shape:
        raise ValueError(
            f"the quantized kernel has K={kernel.shape[0]} and N={kernel.shape[1]}, "
            f"and the layer has in_features={shape[0]} and out_features={shape[1]}."
        )
    return QuantizedKernel(kernel)

"""Which linears the `triton` back end runs."""

from jaxlora.pallas_kernels.operands import unsupported_linear
from jaxlora.pallas_kernels.projection import LinearShape
from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.triton.target import unsupported_device

_ALIGNED_FEATURES = 8  # rows of 16 bytes, which one asynchronous copy moves


def unsupported(shape: LinearShape) -> str | None:
    """Returns why these kernels cannot run such a linear here, or None if they can."""
    if (reason := unsupported_device()) is not None:
        return reason
    if shape.weight_format == Fp8Weight.format:
        return "its kernels have no products with fp8 weights"
    return unsupported_linear(shape, multiple=_ALIGNED_FEATURES)

"""The layouts of fp8 and int8 weights with scales per row, tensor or block."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from jaxlora.hf.quantized.stored import (
    FLOATS,
    BlockWeight,
    StorageLayout,
    StoredTensor,
    check_scales,
    host_weight,
)
from jaxlora.pallas_kernels import FORMATS, Fp8Weight, Int8Weight, QuantizedWeight

DTYPES = {Fp8Weight.format: "F8_E4M3", Int8Weight.format: "I8"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLayout(StorageLayout):
    """`weight` [N, K] and `weight_scale`, of which W is the product."""

    def tensors(
        self, shape: tuple[int, int], has: Callable[[str], bool]
    ) -> tuple[StoredTensor, ...]:
        """Returns the weight and its scales, one per output feature or one for all."""
        n, _ = shape
        scales = ((n, 1), (n,), (1, 1), (1,), ())
        return (
            StoredTensor(name="weight", dtypes=(self.weight_dtype,), shapes=(shape,)),
            StoredTensor(name="weight_scale", dtypes=FLOATS, shapes=scales),
        )

    def weight(
        self, shape: tuple[int, int], arrays: Mapping[str, np.ndarray], where: str
    ) -> QuantizedWeight:
        """Returns the weight as it is."""
        scale = arrays["weight_scale"]
        check_scales(scale, f"{where}.weight_scale")
        scale = np.broadcast_to(scale.astype(np.float32).reshape(-1), shape[:1])
        # The scale of a row of zeros may be 0, but kernels divide by it. A value of fp8
        # times this scale is below 1e-16, with which nothing can be done either.
        scale = np.maximum(scale, np.float32(FORMATS[self.format].smallest_scale))
        return host_weight(
            self.format, values=arrays["weight"], scale=np.ascontiguousarray(scale)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockLayout(StorageLayout):
    """`weight` [N, K] in e4m3 with one scale per block, as of DeepSeek and Qwen.

    Attributes:
        block: Rows and columns of a block.
        scale_name: Name of the tensor of the scales.
    """

    format: str = Fp8Weight.format
    weight_dtype: str = DTYPES[Fp8Weight.format]
    block: tuple[int, int]
    scale_name: str

    def tensors(
        self, shape: tuple[int, int], has: Callable[[str], bool]
    ) -> tuple[StoredTensor, ...]:
        """Returns the weight and the scales of its blocks."""
        blocks = -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])
        return (
            StoredTensor(name="weight", dtypes=(self.weight_dtype,), shapes=(shape,)),
            StoredTensor(name=self.scale_name, dtypes=FLOATS, shapes=(blocks,)),
        )

    def weight(
        self, shape: tuple[int, int], arrays: Mapping[str, np.ndarray], where: str
    ) -> BlockWeight:
        """Returns the weight with its blocks."""
        scale = arrays[self.scale_name].astype(np.float32)
        check_scales(scale, f"{where}.{self.scale_name}")
        return BlockWeight(values=arrays["weight"], scale=scale, block=self.block)

"""The layout of fp8 weights with one scale per block, as of DeepSeek and Qwen."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from jaxlora.hf.quantized.block_weight import BlockWeight
from jaxlora.hf.quantized.rows import DTYPES
from jaxlora.hf.quantized.stored import (
    FLOATS,
    StorageLayout,
    StoredTensor,
    check_scales,
)
from jaxlora.pallas_kernels import Fp8Weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockLayout(StorageLayout):
    """`weight` [N, K] in e4m3 with one scale per block.

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

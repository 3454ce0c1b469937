"""The ways in which checkpoints store quantized linears; bitsandbytes has a file."""

import abc
import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn

from jaxlora.errors import ModelError
from jaxlora.pallas_kernels import (
    FORMATS,
    Fp8Weight,
    Int8Weight,
    Mxfp4Weight,
    QuantizedWeight,
)

# Dtypes of scales, and of the values of formats, by their names in safetensors.
_SCALES = ("F32", "F16", "BF16")
_NAN_EXPONENT = 255  # of e8m0
_VALUES = {Fp8Weight.format: "F8_E4M3", Int8Weight.format: "I8"}


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockWeight:
    """A weight in e4m3 with one scale per block, before it is requantized.

    `W[n, k] = values[n, k] * scale[n / b0, k / b1]` with blocks of b0 by b1
    values.

    Attributes:
        values: The e4m3 values.
        scale: Scale of each block; the blocks at the edges may be smaller.
        block: b0 and b1.
    """

    values: Float8e4m3fn[Array | np.ndarray, "N K"]
    scale: Float[Array | np.ndarray, "_ _"]
    block: tuple[int, int] = dataclasses.field(metadata={"static": True})

    def dequantize(self, dtype: DTypeLike) -> Float[Array, "N K"]:
        """Returns W, computed in float32 and rounded once to `dtype`."""
        n, k = self.values.shape
        rows = jnp.repeat(self.scale, self.block[0], axis=0)[:n]
        scale = jnp.repeat(rows, self.block[1], axis=1)[:, :k]
        return (jnp.asarray(self.values).astype(jnp.float32) * scale).astype(dtype)


# A weight as it is stored, in arrays of the host.
StoredWeight = QuantizedWeight | BlockWeight


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of a quantized linear in a checkpoint.

    Attributes:
        name: Its name after that of the linear, such as `weight_scale`.
        dtypes: The dtypes that it may have, as safetensors names them.
        shapes: The shapes that it may have; none: that of any vector.
    """

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] = ()

    def allows(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the tensor may have a shape."""
        return shape in self.shapes if self.shapes else len(shape) == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageLayout(abc.ABC):
    """One way to store quantized linears.

    A linear whose tensor `weight` holds no floats of 16 bits or more is quantized. So a
    checkpoint's list of the modules that were not converted need not be interpreted.

    Attributes:
        kind: Name of the layout, for messages.
        format: Name in `FORMATS` of the weights after they were loaded.
        is_of_experts: Whether checkpoints store experts alone so, which is assumed
            where their weights are not there.
    """

    kind: str
    format: str
    is_of_experts: bool = False

    @abc.abstractmethod
    def tensors(
        self, shape: tuple[int, int], has: Callable[[str], bool]
    ) -> tuple[StoredTensor, ...]:
        """Returns the tensors that a linear consists of.

        Args:
            shape: N and K of the linear.
            has: Tells whether the checkpoint holds a tensor of this linear, by the name
                after that of the linear.
        """

    def options(self, tensors: Sequence[str]) -> dict[str, Any]:
        """Returns the options of the format that a linear's tensors show.

        Args:
            tensors: Names of the linear's tensors.
        """
        return {}

    @abc.abstractmethod
    def weight(
        self, shape: tuple[int, int], arrays: Mapping[str, np.ndarray], where: str
    ) -> StoredWeight:
        """Returns a linear's weight, in arrays of the host.

        Args:
            shape: N and K of the linear.
            arrays: Contents of `tensors`, by name; floats are finite.
            where: File and name of the linear, for errors.

        Raises:
            ModelError: The tensors are not consistent, or hold what is not supported.
        """


def host_weight(name: str, **arrays: np.ndarray) -> QuantizedWeight:
    """Returns a weight of a format in `FORMATS` whose arrays are on the host."""
    kind: Any = FORMATS[name]
    return kind(**arrays)


def check_scales(scale: np.ndarray, where: str) -> None:
    """Refuses negative scales.

    Args:
        scale: Scales.
        where: File and name of the tensor, for the error.

    Raises:
        ModelError: A scale is negative.
    """
    least = float(scale.astype(np.float32).min(initial=0))
    if least < 0:
        raise ModelError(
            f"{where} holds the scale {least:g}; scales must not be negative. The file "
            "is damaged: fetch or copy it again."
        )


# ---- fp8 and int8 with scales per row, tensor or block -------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLayout(StorageLayout):
    """`weight` [N, K] and a scale, of which W is the product.

    Attributes:
        scale_name: Name of the tensor of the scales.
    """

    scale_name: str = "weight_scale"

    def tensors(
        self, shape: tuple[int, int], has: Callable[[str], bool]
    ) -> tuple[StoredTensor, ...]:
        """Returns the weight and its scales, one per output feature or one for all."""
        n, _ = shape
        scales = ((n, 1), (n,), (1, 1), (1,), ())
        return (
            StoredTensor(
                name="weight", dtypes=(_VALUES[self.format],), shapes=(shape,)
            ),
            StoredTensor(name=self.scale_name, dtypes=_SCALES, shapes=scales),
        )

    def weight(
        self, shape: tuple[int, int], arrays: Mapping[str, np.ndarray], where: str
    ) -> QuantizedWeight:
        """Returns the weight as it is."""
        scale = arrays[self.scale_name]
        check_scales(scale, f"{where}.{self.scale_name}")
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
    block: tuple[int, int]
    scale_name: str

    def tensors(
        self, shape: tuple[int, int], has: Callable[[str], bool]
    ) -> tuple[StoredTensor, ...]:
        """Returns the weight and the scales of its blocks."""
        blocks = -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])
        return (
            StoredTensor(
                name="weight", dtypes=(_VALUES[self.format],), shapes=(shape,)
            ),
            StoredTensor(name=self.scale_name, dtypes=_SCALES, shapes=(blocks,)),
        )

    def weight(
        self, shape: tuple[int, int], arrays: Mapping[str, np.ndarray], where: str
    ) -> BlockWeight:
        """Returns the weight with its blocks."""
        scale = arrays[self.scale_name].astype(np.float32)
        check_scales(scale, f"{where}.{self.scale_name}")
        return BlockWeight(values=arrays["weight"], scale=scale, block=self.block)


# ---- mxfp4 ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mxfp4Layout(StorageLayout):
    """The experts of gpt-oss: two values per byte of `weight`, and `scales` of 32 each.

    A checkpoint has one tensor of all experts, with a dimension of blocks, which are
    divided by expert when it is opened.
    """

    kind: str = "mxfp4"
    format: str = Mxfp4Weight.format
    is_of_experts: bool = True

    def tensors(
        self, shape: tuple[int, int], has: Callable[[str], bool]
    ) -> tuple[StoredTensor, ...]:
        """Returns the weight and the exponents of its blocks."""
        n, k = shape
        shapes = {"weight": (n, k // 2), "scales": (n, k // 32)}
        return tuple(
            StoredTensor(name=name, dtypes=("U8",), shapes=(own,))
            for name, own in shapes.items()
        )

    def weight(
        self, shape: tuple[int, int], arrays: Mapping[str, np.ndarray], where: str
    ) -> QuantizedWeight:
        """Returns the weight as it is."""
        scale = arrays["scales"]
        if scale.max(initial=0) == _NAN_EXPONENT:
            raise ModelError(
                f"{where}.scales holds NaN, so nothing can be computed with it. The "
                "file is damaged: fetch or copy it again."
            )
        return host_weight(self.format, values=arrays["weight"], scale=scale)

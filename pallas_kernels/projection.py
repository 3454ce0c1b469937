"""A frozen linear with adapters as the kernels see it, and its shape."""

import dataclasses
import typing

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.dora import DoraGain
from jaxlora.pallas_kernels.dropout import Dropout
from jaxlora.pallas_kernels.given_mask import GivenMask
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight
from jaxlora.pallas_kernels.settings import KernelSettings


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection:
    """A frozen linear with a LoRA for each slot.

    Attributes:
        w: Frozen base weight, in x's dtype, or a stack of L of them; [N, K] if stored
            transposed; or one quantized weight.
        a: Shrink matrices of the slots; ranks below R are zero-padded.
        b: Expand matrices of the slots; ranks below R are zero-padded.
        scaling: `lora_alpha / rank` of each slot; 0 switches a slot off.
        rank: Rank of each slot; None: R. Kernels skip chunks of padding.
        bias: Frozen bias.
        dropout: Mask of the LoRA path, computed in the kernels or given by the caller;
            None drops nothing.
        dora: Gains of the output features; None: no slot has DoRA. They are applied to
            the output of the kernels, so every back end runs them.
        settings: What kernels compute from scaling, rank and dropout rate, computed for
            many projections at once by `kernel_settings`; None: they compute their own.
    """

    w: Float[Array, "K N"] | Float[Array, "L K N"] | QuantizedWeight
    a: Float[Array, "G K R"]
    b: Float[Array, "G R N"]
    scaling: Float[Array, " G"]
    rank: Int[Array, " G"] | None = None
    bias: Float[Array, " N"] | None = None
    dropout: Dropout | GivenMask | None = None
    dora: DoraGain | None = None
    settings: KernelSettings | None = None

    @property
    def dense_w(self) -> jax.Array:
        """Returns w, which must not be quantized."""
        assert not isinstance(self.w, QuantizedWeight)
        return self.w

    @property
    def factor(self) -> Float[Array, " G"]:
        """Multiplier of s = dropout(x) A, by slot: scaling / (1 - rate)."""
        if self.dropout is None:
            return self.scaling
        return self.scaling * self.dropout.inverse_keep


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearShape:
    """The sizes on which it depends whether a back end can run a linear.

    Attributes:
        dtype: Dtype of x, and of w unless it is quantized.
        in_features: K.
        out_features: N.
        rank: R, the largest rank of a slot.
        block_tokens: Rows of a token block, T / NB.
        weight_format: Format of a quantized w, a name in `FORMATS`; None: w is not
            quantized.
    """

    dtype: DTypeLike
    in_features: int
    out_features: int
    rank: int
    block_tokens: int
    weight_format: str | None = None

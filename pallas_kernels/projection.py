"""A frozen linear with adapters as the kernels see it, its settings and its shape."""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt

from jaxlora.pallas_kernels.dora import DoraGain
from jaxlora.pallas_kernels.dropout import Dropout, inverse_keep, threshold
from jaxlora.pallas_kernels.given_mask import GivenMask
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight

RANK_STEP = 64  # ranks of one step of the kernels' LoRA products
ROWS = ("factor", "num_chunks", "threshold")


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KernelSettings:
    """The slots' settings of P projections, as the kernels read them.

    A model computes them once and gives every layer the same arrays. If each layer
    computed its own, they would become one XLA kernel with three outputs for every
    linear of the model, and XLA would take longer to compile that one than all the
    other kernels together.

    Attributes:
        factor: Multiplies s: `scaling / (1 - rate)`.
        num_chunks: Number of chunks of 64 ranks of each slot; 0 if it is switched off.
        threshold: A feature is dropped if its random word is below.
        index: Index of this projection among the P.
    """

    factor: Float[Array, "P G"] | None
    num_chunks: Int[Array, "P G"] | None
    threshold: UInt[Array, "P G"] | None
    index: Int[Array, " 1"] | None

    def only(self, *names: str) -> "KernelSettings":
        """Returns the settings with None for all rows but `names`.

        XLA's compile time grows with the number of a kernel's operands, so a kernel is
        given only the rows that it reads.
        """
        unread = {name: None for name in ROWS if name not in names}
        return dataclasses.replace(self, **unread)

    def select(self) -> "KernelSettings":
        """Returns this projection's rows, G each. Only for use in a kernel."""
        refs: Any = self
        index = refs.index[0]
        given = {name: getattr(refs, name) for name in ROWS}
        rows = {k: None if ref is None else ref.at[index] for k, ref in given.items()}
        return KernelSettings(**rows, index=None)


def kernel_settings(
    scaling: Float[Array, "P G"],
    rank: Int[Array, "P G"],
    rate: Float[Array, "P G"] | None,
) -> list[KernelSettings]:
    """Computes the settings of P projections; returns one object for each.

    Args:
        scaling: `lora_alpha / rank` of each slot; 0 switches a slot off.
        rank: Rank of each slot.
        rate: Dropout rate of each slot; None: nothing is dropped.
    """
    rate = jnp.zeros_like(scaling) if rate is None else rate
    live_rank = jnp.where(scaling == 0, 0, rank)
    shared = (
        (scaling * inverse_keep(rate)).astype(jnp.float32),
        jax.lax.div(live_rank + (RANK_STEP - 1), jnp.int32(RANK_STEP)),
        threshold(rate),
    )
    indices = np.arange(scaling.shape[0], dtype=np.int32)[:, None]
    return [KernelSettings(*shared, jnp.asarray(index)) for index in indices]


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
    def weight_format(self) -> str | None:
        """Returns the format of a quantized w, or None if w is not quantized."""
        return self.w.format if isinstance(self.w, QuantizedWeight) else None

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

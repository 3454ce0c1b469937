"""A frozen linear with adapters, as an argument of the kernels."""

import dataclasses
import typing

import jax
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.dropout import Dropout
from jaxlora.pallas_kernels.settings import KernelSettings


@typing.no_type_check  # JAX rebuilds it around things that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection:
    """A frozen linear with a LoRA for each slot.

    Attributes:
        w: Frozen base weight, in x's dtype; or a stack of L of them. N K if stored
            transposed.
        a: Shrink matrices of the slots; ranks below R are zero-padded.
        b: Expand matrices of the slots; ranks below R are zero-padded.
        scaling: `lora_alpha / rank` of each slot; 0 switches a slot off.
        rank: Rank of each slot; None: R. Spares the kernels the padding.
        bias: Frozen bias.
        dropout: Mask of the LoRA path; None drops nothing.
        settings: The same as scaling, rank and the dropout's rate, computed for many
            projections at once by `kernel_settings`, for the fused kernels; None: they
            compute their own.
    """

    w: Float[Array, "K N"] | Float[Array, "L K N"]
    a: Float[Array, "G K R"]
    b: Float[Array, "G R N"]
    scaling: Float[Array, " G"]
    rank: Int[Array, " G"] | None = None
    bias: Float[Array, " N"] | None = None
    dropout: Dropout | None = None
    settings: KernelSettings | None = None

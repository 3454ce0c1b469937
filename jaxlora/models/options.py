"""How a decoder runs."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jaxlora.models.base_format import BaseFormat
from jaxlora.modules.attention import AttentionImplementation, WideHeads
from jaxlora.modules.length_classes import SegmentLengths
from jaxlora.objectives.table import NEXT_TOKEN

# The part of each layer that the backward pass recomputes instead of keeping it, from
# the weakest on.
Remat = Literal["none", "elementwise", "mlp", "layer"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecoderOptions:
    """Options of how a decoder runs; they change its results by rounding at most.

    Attributes:
        dtype: Dtype of weights that are not quantized, and of activations.
        base_format: How the linears of the layers are quantized; None: they are not.
        remat: Part of each layer that the backward pass recomputes instead of keeping
            it: nothing, what no linear and no attention computes, the MLP with its
            norm, or the whole layer.
        implementation: Name of the LoRA kernels' back end.
        attention: Implementation of attention.
        wide_heads: Attention of layers with wider heads than the others; None: there
            are none, or `attention` runs them, too.
        max_segment_tokens: Upper bound on the length of packed samples.
        mean_segment_tokens: Mean length of the samples of the job with the shortest
            samples, or less. cuDNN attention has room for one and a half times the
            number of samples that this gives for a microbatch. A run leaves it at the
            default if its attention does not depend on it, so that programs are the
            same for other data.
        fsdp: Number of devices among which each large weight is divided. If it is more
            than 1, the decoder must run inside `jax.shard_map` that is manual over an
            axis `fsdp` of that size.
        expert: Number of devices among which the experts of each layer are divided; see
            `jaxlora.sharding.expert`. If it is more than 1, the decoder must run inside
            `jax.shard_map` that is manual over an axis `expert` of that size.
        tensor: Number of devices among which the decoder is divided; this one is the
            part of a device then, see `jaxlora.models.tensor_parallel`. If it is more
            than 1, the decoder must run inside `jax.shard_map` that is manual over an
            axis `tensor` of that size. Hidden states between the halves of its layers
            have a part of the rows then.
        kv_parts: Number of these devices that have different key-value heads.
        most_adapters: Most slots that have rows in a microbatch, if some of them adapt
            experts; None: all slots may. The result is NaN where more have rows.
        objectives: Objectives of the jobs that it can train.
        layers_per_program: Number of layers that each program runs; None: all of them.
            See `jaxlora.models.sections`.
    """

    dtype: jnp.dtype
    base_format: BaseFormat | None = None
    remat: Remat = "none"
    implementation: str = "xla"
    attention: AttentionImplementation = "xla"
    wide_heads: WideHeads | None = None
    max_segment_tokens: int
    mean_segment_tokens: int = 64
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    kv_parts: int = 1
    most_adapters: int | None = None
    objectives: tuple[str, ...] = (NEXT_TOKEN.name,)
    layers_per_program: int | None = None

    def __post_init__(self):
        if self.fsdp < 1:
            raise ValueError(
                f"fsdp={self.fsdp} must be a number of devices, 1 or more; 1 does not "
                "divide the weights."
            )

    def weight_format(self, path: str) -> str | None:
        """Returns the format of a linear's weight; None if it is not quantized."""
        base = self.base_format
        return base.name if base is not None and base.quantizes(path) else None

    def attention_of(self, head_dim: int) -> AttentionImplementation:
        """Returns the implementation of attention for heads of this size."""
        wide = self.wide_heads
        if wide is None or wide.features != head_dim:
            return self.attention
        return wide.implementation

    @property
    def lengths(self) -> SegmentLengths:
        """Lengths of the packed samples."""
        return SegmentLengths(self.max_segment_tokens, self.mean_segment_tokens)

"""The table of attention implementations; `packed_attention` runs them by name."""

import dataclasses
import math
from collections.abc import Callable
from typing import get_args

from jax.typing import DTypeLike

from jaxlora.models.config import ModelConfig
from jaxlora.modules.attention import AttentionImplementation
from jaxlora.modules.cudnn_attention import cudnn_unsupported
from jaxlora.modules.length_classes import SegmentLengths, length_classes
from jaxlora.modules.triton_attention import triton_unsupported


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChoice:
    """One implementation of packed attention.

    Attributes:
        name: The value of `attention` that selects it.
        unsupported: Returns why it cannot run a model in a dtype on the default device,
            as a clause without a full stop; None if it can.
        scratch_bytes: Returns the bytes that the backward pass of one layer takes for
            itself with a number of tokens; None: the compiler reports them, on any
            device.
        depends_on_mean: Whether its program depends on the mean length of the samples,
            and not only on the longest.
        traced_as: Implementation that keeps the same arrays for the backward pass, and
            can be traced where this one's packages are missing; None: itself.
    """

    name: AttentionImplementation
    unsupported: Callable[[DTypeLike, ModelConfig], str | None]
    scratch_bytes: Callable[[ModelConfig, SegmentLengths, int], int] | None = None
    depends_on_mean: bool = True
    traced_as: AttentionImplementation | None = None


def _cudnn_unsupported(dtype: DTypeLike, model: ModelConfig) -> str | None:
    return cudnn_unsupported(
        dtype=dtype, head_dim=model.head_dim, softcap=model.score_softcap
    )


def _triton_unsupported(dtype: DTypeLike, model: ModelConfig) -> str | None:
    return triton_unsupported(dtype=dtype, head_dim=model.head_dim)


def _cudnn_scratch_bytes(
    model: ModelConfig, lengths: SegmentLengths, num_tokens: int
) -> int:
    """Scratch as XLA reports it on an H200, and arrays of q's width.

    It was compared for heads of 64 and 128 features, samples of up to 512, 2,048 and
    8,192 tokens, and four capacities; see docs/memory.md. cuDNN pads the scores of a
    sequence to multiples of 128 queries and 64 keys.
    """

    def scores(tokens: int) -> int:
        return 128 * math.ceil(tokens / 128) * 64 * math.ceil(tokens / 64)

    scratch = max(
        c.segments * (2 * scores(c.tokens) + c.tokens * (4 * model.head_dim + 8))
        for c in length_classes(num_tokens, *lengths)
    )
    return model.num_heads * (scratch + 5 * model.head_dim * num_tokens)


def _triton_scratch_bytes(
    model: ModelConfig, lengths: SegmentLengths, num_tokens: int
) -> int:
    """A sum in float32 for each query and head, and arrays of q's width."""
    return model.num_heads * (4 + 5 * model.head_dim) * num_tokens


# In order of preference: `auto` takes the first that can run the model.
ATTENTIONS: dict[str, AttentionChoice] = {
    choice.name: choice
    for choice in (
        AttentionChoice(
            name="cudnn",
            unsupported=_cudnn_unsupported,
            scratch_bytes=_cudnn_scratch_bytes,
        ),
        AttentionChoice(
            name="triton",
            unsupported=_triton_unsupported,
            scratch_bytes=_triton_scratch_bytes,
            traced_as="cudnn",
        ),
        AttentionChoice(
            name="xla",
            unsupported=lambda dtype, model: None,
            depends_on_mean=False,
        ),
    )
}
assert ATTENTIONS.keys() == set(get_args(AttentionImplementation))

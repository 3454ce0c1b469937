"""The table of attention implementations; `packed_attention` runs them by name."""

import dataclasses
from collections.abc import Callable
from typing import get_args

from jax.typing import DTypeLike

from jaxlora.families.model_config import ModelConfig
from jaxlora.modules.attention import AttentionImplementation
from jaxlora.modules.cudnn_attention import cudnn_unsupported
from jaxlora.modules.triton_attention import triton_unsupported


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChoice:
    """One implementation of packed attention.

    Attributes:
        name: The value of `attention` that selects it.
        unsupported: Returns why it cannot run a model in a dtype on the default device,
            as a clause without a full stop; None if it can.
    """

    name: AttentionImplementation
    unsupported: Callable[[DTypeLike, ModelConfig], str | None]


def _cudnn_unsupported(dtype: DTypeLike, model: ModelConfig) -> str | None:
    return cudnn_unsupported(
        dtype=dtype, head_dim=model.head_dim, softcap=model.score_softcap
    )


def _triton_unsupported(dtype: DTypeLike, model: ModelConfig) -> str | None:
    return triton_unsupported(dtype=dtype, head_dim=model.head_dim)


# In order of preference: `auto` takes the first that can run the model.
ATTENTIONS: dict[str, AttentionChoice] = {
    choice.name: choice
    for choice in (
        AttentionChoice(name="cudnn", unsupported=_cudnn_unsupported),
        AttentionChoice(name="triton", unsupported=_triton_unsupported),
        AttentionChoice(name="xla", unsupported=lambda dtype, model: None),
    )
}
assert ATTENTIONS.keys() == set(get_args(AttentionImplementation))

"""Causal attention over packed rows, and the attention block of the decoder."""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxlora.models.config import ModelConfig
from jaxlora.modules.banded_attention import banded_attention
from jaxlora.modules.cudnn_attention import DETERMINISTIC, cudnn_attention
from jaxlora.modules.mlp import MakeLinear
from jaxlora.modules.multi_lora_linear import Routing, apply_together
from jaxlora.modules.norm import optional_norm
from jaxlora.modules.rope import RopeTable, apply_rope

AttentionImplementation = Literal["xla", "cudnn"]

# Two values below it have a product that, summed over head_dim, is finite in float32.
# Beyond, a masked pair of rows could give an infinity, and 0 * infinity is NaN.
_LIMIT = 2.0**56


class SegmentLengths(NamedTuple):
    """What is known of packed samples when a program is compiled.

    Attributes:
        longest: Tokens; none is longer.
        mean: Tokens, of the samples or of the job whose samples are shortest; or fewer.
    """

    longest: int
    mean: int


class PackedRows(NamedTuple):
    """What attention knows of the rows of a microbatch, the same in all layers.

    Attributes:
        rope: Of their positions.
        segment_ids: Which sample each belongs to; negative: padding.
        lengths: Of the samples.
    """

    rope: RopeTable
    segment_ids: Int[Array, " T"]
    lengths: SegmentLengths


def compiler_options(implementation: AttentionImplementation) -> dict[str, bool]:
    """What a program with attention's gradient is compiled with, for the same bits."""
    return dict(DETERMINISTIC) if implementation == "cudnn" else {}


def _is_sound(x: Float[Array, "*B"]) -> Bool[Array, "*B"]:
    """Where x is neither NaN nor so large that its sample must have diverged."""
    return jnp.abs(x.astype(jnp.float32)) < _LIMIT


@jax.custom_vjp
def _sound(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Zero where x is not sound, so that 0 * x is 0; its gradient passes as it is."""
    return jnp.where(_is_sound(x), x, 0)


_sound.defvjp(lambda x: (_sound(x), None), lambda _, dx: (dx,))


@jax.custom_vjp
def _sound_gradient(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """x itself; its gradient is zero where it is not sound."""
    return x


_sound_gradient.defvjp(lambda x: (x, None), lambda _, dx: (_sound(dx),))


def packed_attention(
    q: Float[Array, "T H E"],
    k: Float[Array, "T HK E"],
    v: Float[Array, "T HK E"],
    segment_ids: Int[Array, " T"],
    *,
    max_segment_tokens: int,
    mean_segment_tokens: int = 64,
    window: int | None = None,
    implementation: AttentionImplementation = "xla",
) -> Float[Array, "T H E"]:
    """Causal attention in which a row sees the earlier rows of its own segment only.

    A number that is not finite, or 2**56 or more in magnitude (its adapter diverged),
    touches no other segment, forward or backward. In q, k or v it makes its own row's
    output NaN; for the other rows of its segment it counts as zero, and so it does in
    the gradient of the output.

    Args:
        q: Queries; H is a multiple of HK (grouped-query attention).
        k: Keys.
        v: Values.
        segment_ids: Equal for the rows of one sample, which are contiguous; negative
            rows are padding and get zeros.
        max_segment_tokens: At least as long as the longest segment.
        mean_segment_tokens: What the segments have in the mean, or less; cudnn has room
            for one and a half times as many short ones as that makes, see `crowd`.
        window: How many rows back a row sees, itself included; None: all.
        implementation: `xla` runs anywhere; `cudnn` where `cudnn_unsupported` names no
            reason against it, in programs compiled with `compiler_options`.

    Raises:
        ValueError: There is no such implementation.
    """
    choices = get_args(AttentionImplementation)
    if implementation not in choices:
        raise ValueError(
            f"implementation={implementation!r} is unknown; there is: "
            f"{', '.join(choices)}."
        )
    own = _is_sound(q).all((1, 2)) & _is_sound(k).all((1, 2))
    own &= _is_sound(v).all((1, 2))
    q, k, v = _sound(q), _sound(k), _sound(v)
    if implementation == "cudnn":
        lengths = max_segment_tokens, mean_segment_tokens
        out = cudnn_attention(q, k, v, own, segment_ids, *lengths, window)
    else:
        out = banded_attention(q, k, v, segment_ids, max_segment_tokens, window)
        out = jnp.where(own[:, None, None], out, jnp.nan)
    return _sound_gradient(out)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions; its linears take LoRA."""

    def __init__(
        self,
        config: ModelConfig,
        linear: MakeLinear,
        layer: int,
        *,
        dtype,
        implementation: AttentionImplementation = "xla",
    ):
        linears = config.linears()
        self.q_proj = linear(linears["self_attn.q_proj"])
        self.k_proj = linear(linears["self_attn.k_proj"])
        self.v_proj = linear(linears["self_attn.v_proj"])
        self.o_proj = linear(linears["self_attn.o_proj"])
        self.q_norm = optional_norm(config, "self_attn.q_norm", dtype=dtype)
        self.k_norm = optional_norm(config, "self_attn.k_norm", dtype=dtype)
        self.head_dim = config.head_dim
        self.window = config.layer_windows[layer]
        self.implementation: AttentionImplementation = implementation

    def __call__(
        self, x: Float[Array, "T D"], rows: PackedRows, routing: Routing
    ) -> Float[Array, "T D"]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            y.reshape(x.shape[0], -1, self.head_dim)
            for y in apply_together(projections, x, routing)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, *rows.rope), apply_rope(k, *rows.rope)
        out = packed_attention(
            q,
            k,
            v,
            rows.segment_ids,
            max_segment_tokens=rows.lengths.longest,
            mean_segment_tokens=rows.lengths.mean,
            window=self.window,
            implementation=self.implementation,
        )
        return self.o_proj(out.reshape(x.shape[0], -1), routing)

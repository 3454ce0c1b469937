"""Causal attention over packed rows, and the attention block of the decoder."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxlora.families.model_config import ModelConfig, Rope
from jaxlora.modules.banded_attention import banded_attention
from jaxlora.modules.cudnn_attention import DETERMINISTIC, cudnn_attention
from jaxlora.modules.length_classes import SegmentLengths
from jaxlora.modules.multi_lora_linear import MultiLoraLinear
from jaxlora.modules.rope import (
    RopeTable,
    apply_rope,
    rope_frequencies,
    rope_table,
)
from jaxlora.modules.routing import LinearInput, Routing
from jaxlora.modules.scoring import PLAIN, Scoring, layer_scoring
from jaxlora.modules.shared_input import apply_together
from jaxlora.modules.triton_attention import triton_attention

AttentionImplementation = Literal["xla", "cudnn", "triton"]

# The product of two smaller values, summed over head_dim, is finite in float32. Larger
# values could give infinity for a masked pair of rows, and 0 * infinity is NaN.
_LIMIT = 2.0**56


class LayerRopes(NamedTuple):
    """Rotary tables of the positions of rows, for all layers.

    Attributes:
        rope: Rotary table of the rows' positions.
        local_rope: Rotary table of layers with a window; None: they use `rope`.
    """

    rope: RopeTable
    local_rope: RopeTable | None

    def of(self, scoring: Scoring) -> RopeTable:
        """Returns the rotary table of layers with these settings."""
        if scoring.window is None or self.local_rope is None:
            return self.rope
        return self.local_rope


def layer_ropes(config: ModelConfig, positions: Int[Array, " T"]) -> LayerRopes:
    """Makes the rotary tables of all layers.

    Args:
        config: The model.
        positions: Position of each row in its own sequence.
    """

    def table(rope: Rope) -> RopeTable:
        return rope_table(positions, rope_frequencies(rope, config.head_dim))

    local = None if config.local_rope is None else table(config.local_rope)
    return LayerRopes(table(config.rope), local)


class PackedRows(NamedTuple):
    """Attention inputs that all layers share.

    Attributes:
        ropes: Rotary tables of the rows' positions.
        segment_ids: Segment of each row; negative for padding.
        lengths: Lengths of the segments.
    """

    ropes: LayerRopes
    segment_ids: Int[Array, " T"]
    lengths: SegmentLengths


def packed_rows(
    config: ModelConfig,
    positions: Int[Array, " T"],
    segment_ids: Int[Array, " T"],
    lengths: SegmentLengths,
) -> PackedRows:
    """Makes the attention inputs that all layers share.

    Args:
        config: The model.
        positions: Position of each row in its own segment.
        segment_ids: Segment of each row; negative for padding.
        lengths: Lengths of the segments.
    """
    return PackedRows(layer_ropes(config, positions), segment_ids, lengths)


def compiler_options(implementation: AttentionImplementation) -> dict[str, bool]:
    """Returns compiler options that make attention's gradient deterministic."""
    return dict(DETERMINISTIC) if implementation == "cudnn" else {}


def _is_sound(x: Float[Array, "*B"]) -> Bool[Array, "*B"]:
    """Tells where x is neither NaN nor so large that its sample must have diverged."""
    return jnp.abs(x.astype(jnp.float32)) < _LIMIT


@jax.custom_vjp
def _sound(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Replaces what is not sound by zero, so that 0 * x is 0; keeps the gradient."""
    return jnp.where(_is_sound(x), x, 0)


_sound.defvjp(lambda x: (_sound(x), None), lambda _, dx: (dx,))


@jax.custom_vjp
def _sound_gradient(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Returns x, and replaces what is not sound in its gradient by zero."""
    return x


_sound_gradient.defvjp(lambda x: (x, None), lambda _, dx: (_sound(dx),))


def packed_attention(
    q: Float[Array, "T H E"],
    k: Float[Array, "T HK E"],
    v: Float[Array, "T HK E"],
    segment_ids: Int[Array, " T"],
    *,
    lengths: SegmentLengths,
    scoring: Scoring = PLAIN,
    implementation: AttentionImplementation = "xla",
) -> Float[Array, "T H E"]:
    """Causal attention in which a row sees the earlier rows of its own segment only.

    A number that is not finite, or 2**56 or more in magnitude, means that its adapter
    diverged. It affects no other segment, forward or backward. In q, k or v it makes
    the output of its own row NaN. For the other rows of its segment, and in the
    gradient of the output, it counts as zero.

    Args:
        q: Queries; H is a multiple of HK (grouped-query attention).
        k: Keys.
        v: Values.
        segment_ids: Segment of each row; the rows of a segment are contiguous. Padding
            rows are negative and get zeros.
        lengths: Lengths of the segments. `cudnn` has room for one and a half times as
            many short segments as the mean gives, see `shortest_class`.
        scoring: Settings of the scores.
        implementation: `xla` runs anywhere. `cudnn` runs where `cudnn_unsupported`
            names no reason against it, in programs compiled with `compiler_options`.
            `triton` runs where `triton_unsupported` names none.

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
        out = cudnn_attention(q, k, v, own, segment_ids, lengths, scoring)
    elif implementation == "triton":
        out = triton_attention(q, k, v, own, segment_ids, lengths, scoring)
    else:
        out = banded_attention(q, k, v, segment_ids, lengths.longest, scoring)
        out = jnp.where(own[:, None, None], out, jnp.nan)
    return _sound_gradient(out)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions; its linears take LoRA."""

    def __init__(
        self,
        config: ModelConfig,
        make: Any,
    ):
        width, q, kv = config.hidden_size, config.query_features, config.kv_features
        read = {"use_bias": config.qkv_bias}
        self.q_proj = make.linear("self_attn.q_proj", width, q, role="column", **read)
        self.k_proj = make.linear("self_attn.k_proj", width, kv, role="heads", **read)
        self.v_proj = make.linear("self_attn.v_proj", width, kv, role="heads", **read)
        self.o_proj = make.linear(
            "self_attn.o_proj", q, width, role="row", use_bias=config.o_bias
        )
        self.q_norm = make.optional_norm("self_attn.q_norm")
        self.k_norm = make.optional_norm("self_attn.k_norm")
        self.head_dim = config.head_dim
        self.scoring = layer_scoring(config, make.number)
        self.implementation: AttentionImplementation = make.options.attention

    @property
    def input_linears(self) -> tuple[MultiLoraLinear, ...]:
        """The linears that share the input."""
        return self.q_proj, self.k_proj, self.v_proj

    def project(
        self, x: Float[Array, "T D"] | LinearInput, ropes: LayerRopes, routing: Routing
    ) -> tuple[Float[Array, "T H E"], Float[Array, "T HK E"], Float[Array, "T HK E"]]:
        """Computes queries, keys and values, with norms and rotary positions."""
        q, k, v = (
            y.reshape(len(y), -1, self.head_dim)
            for y in apply_together(self.input_linears, x, routing)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        rope = ropes.of(self.scoring)
        return apply_rope(q, *rope), apply_rope(k, *rope), v

    def attend(
        self,
        q: Float[Array, "T H E"],
        k: Float[Array, "T HK E"],
        v: Float[Array, "T HK E"],
        rows: PackedRows,
        routing: Routing,
    ) -> Float[Array, "T D"]:
        """Computes the output from queries, keys and values."""
        out = packed_attention(
            q,
            k,
            v,
            rows.segment_ids,
            lengths=rows.lengths,
            scoring=self.scoring,
            implementation=self.implementation,
        )
        return self.o_proj(out.reshape(len(out), -1), routing)

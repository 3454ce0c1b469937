"""Self-attention, a block of decoder layers."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import ModelConfig
from jaxlora.modules.cached_attention import LayerCache
from jaxlora.modules.multi_lora_linear import MultiLoraLinear
from jaxlora.modules.norm import rms_norm
from jaxlora.modules.rope import apply_rope, as_halves
from jaxlora.modules.routing import LinearInput
from jaxlora.modules.rows import Rows
from jaxlora.modules.scoring import layer_scoring
from jaxlora.modules.shared_input import apply_together


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions; its linears take LoRA."""

    def __init__(
        self,
        config: ModelConfig,
        make: LayerBuilder,
        *,
        norms: Literal["none", "head", "all"] = "none",
        rotates: bool = True,
        neighbours: bool = False,
        fused: bool = False,
        gated: bool = False,
        shares_kv: bool = False,
        norms_values: bool = False,
        has_sinks: bool = False,
    ):
        """Makes the modules.

        Args:
            config: The model.
            make: Makes them.
            norms: Whether queries and keys are normalized: no, each head by itself, or
                all heads together.
            rotates: Whether queries and keys are rotated by their positions.
            neighbours: Whether a feature rotates with the next one, not with one of
                the other half.
            fused: Whether one linear, `qkv_proj`, makes queries, keys and values.
            gated: Whether `q_proj` makes a gate of the output beside each query.
            shares_kv: Whether `k_proj` makes the values, too, which are the keys before
                their norm and rotation.
            norms_values: Whether each head of the values is normalized, by a norm
                without a weight.
            has_sinks: Whether each head has a sink, the score of one more key, whose
                value is zero.
        """
        assert not (fused and (gated or shares_kv))
        config = config.at_layer(make.number)
        width, q, kv = config.hidden_size, config.query_features, config.kv_features
        read = {"use_bias": config.qkv_bias}
        self.fused = fused
        if fused:
            self.qkv_proj = make.linear(
                "self_attn.qkv_proj", width, q + 2 * kv, role="column", **read
            )
        else:
            heads: dict[str, Any] = {"role": "heads", **read}
            self.q_proj = make.linear(
                "self_attn.q_proj", width, (1 + gated) * q, role="column", **read
            )
            self.k_proj = make.linear("self_attn.k_proj", width, kv, **heads)
            if not shares_kv:
                self.v_proj = make.linear("self_attn.v_proj", width, kv, **heads)
        self.o_proj = make.linear(
            "self_attn.o_proj", q, width, role="row", use_bias=config.o_bias
        )
        self.norms, self.rotates, self.neighbours = norms, rotates, neighbours
        self.gated, self.shares_kv = gated, shares_kv
        self.norms_values, self.eps = norms_values, config.rms_eps
        if norms != "none":
            features = (config.head_dim,) * 2 if norms == "head" else (q, kv)
            self.q_norm = make.norm("self_attn.q_norm", features[0])
            self.k_norm = make.norm("self_attn.k_norm", features[1])
        sinks = (config.num_heads,), "self_attn.sinks", ("H",)
        self.sinks = make.weight(*sinks, divided="H") if has_sinks else None
        self.query_features, self.kv_features = q, kv
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.scoring = layer_scoring(config, make.number)
        self.dtype = make.options.dtype

    @property
    def input_linears(self) -> tuple[MultiLoraLinear, ...]:
        """The linears that share the input."""
        if self.fused:
            return (self.qkv_proj,)
        if self.shares_kv:
            return self.q_proj, self.k_proj
        return self.q_proj, self.k_proj, self.v_proj

    def __call__(
        self, x: Float[Array, "T D"] | LinearInput, rows: Rows
    ) -> Float[Array, "T D"]:
        read = apply_together(self.input_linears, x, rows.routing)
        if self.fused:
            ends = self.query_features, self.query_features + self.kv_features
            read = jnp.split(read[0], ends, axis=-1)
        q, k, *others = read
        v, gate = others[0] if others else k, None
        if self.gated:
            heads = q.reshape(len(q), -1, 2 * self.head_dim)
            q, gate = jnp.split(heads, 2, axis=-1)
        if self.norms == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.reshape(len(y), -1, self.head_dim) for y in (q, k, v))
        if self.norms == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.norms_values:
            v = rms_norm(v, jnp.ones(self.head_dim, v.dtype), self.eps)
        if self.rotates:
            rope = rows.rope(self.scoring)
            if self.neighbours:  # in another order, scores are the same
                q, k = (as_halves(x, rope[0].shape[-1]) for x in (q, k))
            q = apply_rope(q, *(rows.ropes.query_rope or rope))
            k = apply_rope(k, *rope)
        sinks = None if self.sinks is None else self.sinks[...]
        out = rows.attend(q, k, v, self.scoring, sinks)
        if gate is not None:
            out = _gated(out, gate)
        return self.o_proj(out.reshape(len(out), -1), rows.routing)

    def empty_cache(self, num_sequences: int, num_tokens: int) -> LayerCache:
        """Returns the cache of generation before its first tokens.

        Args:
            num_sequences: Number of sequences.
            num_tokens: Tokens of each sequence that it holds.
        """
        shape = num_sequences, self.num_kv_heads, num_tokens, self.head_dim
        return LayerCache(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype))


@jax.checkpoint
def _gated(
    x: Float[Array, "T H E"], gate: Float[Array, "T H E"]
) -> Float[Array, "T H E"]:
    """`x * sigmoid(gate)`, in float32; the backward pass keeps x and the gate."""
    wide = x.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return wide.astype(x.dtype)

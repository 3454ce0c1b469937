"""The attention block of the decoder."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlora.families.model_config import ModelConfig
from jaxlora.modules.cached_attention import LayerCache
from jaxlora.modules.multi_lora_linear import MultiLoraLinear
from jaxlora.modules.rope import apply_rope
from jaxlora.modules.routing import LinearInput
from jaxlora.modules.rows import Rows
from jaxlora.modules.scoring import layer_scoring
from jaxlora.modules.shared_input import apply_together


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions; its linears take LoRA."""

    def __init__(self, config: ModelConfig, make: Any):
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
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.scoring = layer_scoring(config, make.number)
        self.dtype = make.options.dtype

    @property
    def input_linears(self) -> tuple[MultiLoraLinear, ...]:
        """The linears that share the input."""
        return self.q_proj, self.k_proj, self.v_proj

    def __call__(
        self, x: Float[Array, "T D"] | LinearInput, rows: Rows
    ) -> Float[Array, "T D"]:
        q, k, v = (
            y.reshape(len(y), -1, self.head_dim)
            for y in apply_together(self.input_linears, x, rows.routing)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        rope = rows.rope(self.scoring)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        out = rows.attend(q, k, v, self.scoring)
        return self.o_proj(out.reshape(len(out), -1), rows.routing)

    def empty_cache(self, num_sequences: int, num_tokens: int) -> LayerCache:
        """Returns the cache of generation before its first tokens.

        Args:
            num_sequences: Number of sequences.
            num_tokens: Tokens of each sequence that it holds.
        """
        shape = num_sequences, self.num_kv_heads, num_tokens, self.head_dim
        return LayerCache(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype))

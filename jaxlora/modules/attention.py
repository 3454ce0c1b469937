"""Causal attention over packed rows, and the attention block of the decoder."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlora.models.config import ModelConfig
from jaxlora.modules.multi_lora_linear import Routing, apply_together
from jaxlora.modules.norm import RmsNorm
from jaxlora.modules.rope import apply_rope

_MAX_BLOCK_Q = 128


@jax.custom_vjp
def _finite(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Zero where x is not finite, so that 0 * x is 0; the same for its gradient."""
    return jnp.where(jnp.isfinite(x), x, 0)


_finite.defvjp(lambda x: (_finite(x), None), lambda _, dx: (_finite(dx),))


@jax.custom_vjp
def _finite_gradient(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """x itself; its gradient is zero where it is not finite."""
    return x


_finite_gradient.defvjp(lambda x: (x, None), lambda _, dx: (_finite(dx),))


def packed_attention(
    q: Float[Array, "T H E"],
    k: Float[Array, "T HK E"],
    v: Float[Array, "T HK E"],
    segment_ids: Int[Array, " T"],
    *,
    max_segment_tokens: int,
    window: int | None = None,
) -> Float[Array, "T H E"]:
    """Causal attention in which a row sees the earlier rows of its own segment only.

    A block of queries is compared with a band of keys as wide as the longest segment,
    not with all T. A row that is not finite (its adapter diverged) makes its own
    segment's output NaN and touches no other segment, forward or backward.

    Args:
        q: Queries; H is a multiple of HK (grouped-query attention).
        k: Keys.
        v: Values.
        segment_ids: Equal for the rows of one sample, which are contiguous; negative
            rows are padding and get zeros.
        max_segment_tokens: At least as long as the longest segment.
        window: How many rows back a row sees, itself included; None: all.
    """
    t, num_heads, _ = q.shape
    block_q = math.gcd(t, _MAX_BLOCK_Q)
    reach = min(max_segment_tokens, window or max_segment_tokens, t)
    band = min(t, block_q + -(-(reach - 1) // block_q) * block_q)

    def banded(x, fill=0):
        """Row i of the result: the `band` rows that end where query block i ends."""
        pad = [(band - block_q, 0)] + [(0, 0)] * (x.ndim - 1)
        padded = jnp.pad(x, pad, constant_values=fill)
        return jnp.stack([padded[i : i + band] for i in range(0, t, block_q)])

    own = jnp.isfinite(q).all((1, 2)) & jnp.isfinite(k).all((1, 2))
    own &= jnp.isfinite(v).all((1, 2))
    q, k, v = _finite(q), _finite(k), _finite(v)
    q_I = q.reshape(t // block_q, block_q, k.shape[1], -1, q.shape[2])
    rows = jnp.arange(t)
    mask = _mask(
        (rows.reshape(-1, block_q), segment_ids.reshape(-1, block_q)),
        (banded(rows, fill=t), banded(segment_ids, fill=-1)),
        window,
    )
    out = _attend(q_I, banded(k), banded(v), mask)
    out = out.reshape(t, num_heads, -1)
    return jnp.where(own[:, None, None], _finite_gradient(out), jnp.nan)


def _mask(queries, keys, window):
    (row_q, segment_q), (row_k, segment_k) = queries, keys
    back = row_q[:, :, None] - row_k[:, None, :]
    same = segment_q[:, :, None] == segment_k[:, None, :]
    mask = same & (segment_q >= 0)[:, :, None] & (back >= 0)
    return mask if window is None else mask & (back < window)


@jax.checkpoint
def _attend(q, k, v, mask):
    """Softmax attention by block; the probabilities are made again for the gradient."""
    scale = q.shape[-1] ** -0.5
    scores = jnp.einsum("iqgre,ikge->igrqk", q, k, preferred_element_type=jnp.float32)
    mask = mask[:, None, None]
    scores = jnp.where(mask, scores * scale, -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - jnp.where(top > -jnp.inf, top, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    return jnp.einsum("igrqk,ikge->iqgre", weights.astype(v.dtype), v)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions; its linears take LoRA."""

    def __init__(self, config: ModelConfig, linear, layer: int, *, dtype):
        heads, kv = config.num_heads, config.num_kv_heads
        width, e = config.hidden_size, config.head_dim
        self.q_proj = linear("self_attn.q_proj", width, heads * e, config.qkv_bias)
        self.k_proj = linear("self_attn.k_proj", width, kv * e, config.qkv_bias)
        self.v_proj = linear("self_attn.v_proj", width, kv * e, config.qkv_bias)
        self.o_proj = linear("self_attn.o_proj", heads * e, width, config.o_bias)
        norm = functools.partial(RmsNorm, e, eps=config.rms_eps, dtype=dtype)
        self.q_norm = norm() if config.qk_norm else None
        self.k_norm = norm() if config.qk_norm else None
        self.head_dim = e
        self.window = config.layer_windows[layer]

    def __call__(self, x, rope, segment_ids, routing: Routing, max_segment_tokens: int):
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            y.reshape(x.shape[0], -1, self.head_dim)
            for y in apply_together(projections, x, routing)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        out = packed_attention(
            q,
            k,
            v,
            segment_ids,
            max_segment_tokens=max_segment_tokens,
            window=self.window,
        )
        return self.o_proj(out.reshape(x.shape[0], -1), routing)

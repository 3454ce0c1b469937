"""Causal attention over packed rows in plain JAX, for any device."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.modules.scoring import Scoring, softcap

_MAX_BLOCK_Q = 128
_MAX_SCORE_BYTES = 512 * 2**20


def banded_attention(
    q: Float[Array, "T H E"],
    k: Float[Array, "T HK E"],
    v: Float[Array, "T HK E"],
    segment_ids: Int[Array, " T"],
    max_segment_tokens: int,
    scoring: Scoring,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "T H E"]:
    """Attention as `packed_attention` defines it, for rows that are all sound.

    A block of queries is compared with a band of keys as wide as the longest segment,
    not with all T rows. Blocks run together as long as their scores fit in 512 MiB, and
    in groups one after the other if they do not. No scores are kept for the gradient.

    Args:
        q: Queries; H is a multiple of HK.
        k: Keys.
        v: Values.
        segment_ids: Segment of each row; padding rows are negative and get zeros.
        max_segment_tokens: Upper bound on the length of a segment.
        scoring: Settings of the scores.
        sinks: See `packed_attention`.
    """
    t, num_heads, _ = q.shape
    block = math.gcd(t, _MAX_BLOCK_Q)
    band = min(t, band_tokens(min(max_segment_tokens, t), scoring.window, block))
    num_blocks = t // block
    group = _group(num_blocks, block * band * num_heads * 4)

    def before(x, fill=0):
        """Pads x in front by as many rows as the first block's band reaches back."""
        pad = [(band - block, 0)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, pad, constant_values=fill)

    rows = jnp.arange(t)
    behind = (before(k), before(v), before(rows, t), before(segment_ids, -1))
    blocks = q.reshape(
        -1, group, block, k.shape[1], num_heads // k.shape[1], q.shape[2]
    )
    own = (rows.reshape(-1, group, block), segment_ids.reshape(-1, group, block))

    def attend(first, q, own):
        """Runs the blocks of one group, whose first row is `first`."""
        width = (group - 1) * block + band
        part = [jax.lax.dynamic_slice_in_dim(x, first, width) for x in behind]
        k, v, *theirs = (
            jnp.stack([x[i * block : i * block + band] for i in range(group)])
            for x in part
        )
        mask = _mask(own, theirs, scoring.window)
        return _attend(q, k, v, mask, sinks, scoring)

    if group == num_blocks:
        out = attend(0, blocks[0], (own[0][0], own[1][0]))
    else:
        firsts = jnp.arange(0, t, group * block)
        once = jax.checkpoint(lambda group: attend(*group))
        out = jax.lax.map(once, (firsts, blocks, own))
    return out.reshape(q.shape)


def band_tokens(
    max_segment_tokens: int, window: int | None, block: int = _MAX_BLOCK_Q
) -> int:
    """Returns the keys with which each query of a block is compared.

    Args:
        max_segment_tokens: Upper bound on the length of a segment.
        window: How many rows back a row sees, itself included; None: all.
        block: Queries of a block.
    """
    reach = min(max_segment_tokens, window or max_segment_tokens)
    return block + -(-(reach - 1) // block) * block


def _group(num_blocks: int, block_bytes: int) -> int:
    """Returns how many blocks run together, a divisor of their number."""
    fit = max(1, _MAX_SCORE_BYTES // block_bytes)
    return max(n for n in range(1, min(num_blocks, fit) + 1) if num_blocks % n == 0)


def _mask(queries, keys, window):
    (row_q, segment_q), (row_k, segment_k) = queries, keys
    back = row_q[:, :, None] - row_k[:, None, :]
    same = segment_q[:, :, None] == segment_k[:, None, :]
    mask = same & (segment_q >= 0)[:, :, None] & (back >= 0)
    return mask if window is None else mask & (back < window)


@functools.partial(jax.checkpoint, static_argnums=5)
def _attend(q, k, v, mask, sinks, scoring: Scoring):
    """Softmax attention by block; the gradient recomputes the probabilities."""
    scale = scoring.scale_of(q.shape[-1])
    scores = jnp.einsum("iqgre,ikge->igrqk", q, k, preferred_element_type=jnp.float32)
    mask = mask[:, None, None]
    scores = jnp.where(mask, softcap(scores * scale, scoring.softcap), -jnp.inf)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(*scores.shape[1:3], 1, 1)
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - jnp.where(top > -jnp.inf, top, 0))
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks - top)
    # The weights are zero where the mask is false. The selection makes their gradient
    # zero there, too.
    weights = jnp.where(mask, weights / jnp.where(total > 0, total, 1), 0)
    return jnp.einsum("igrqk,ikge->iqgre", weights.astype(v.dtype), v)

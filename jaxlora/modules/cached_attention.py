"""Attention over cached keys and values, in plain JAX, for any device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.modules.scoring import Scoring, softcap

# It is finite, as a query of the padding sees nothing, and would get NaN from infinity.
_MASKED = -1e30


class LayerCache(NamedTuple):
    """Keys and values of one layer, with B sequences of up to C tokens.

    Heads come before tokens, so that the products of decoding read the arrays as they
    are stored.

    Attributes:
        keys: Keys, after their norm and rotation.
        values: Values.
    """

    keys: Float[Array, "B HK C E"]
    values: Float[Array, "B HK C E"]


def cached_attention(
    q: Float[Array, "B S H E"],
    k: Float[Array, "B S HK E"],
    v: Float[Array, "B S HK E"],
    cache: LayerCache,
    place: Int[Array, " B"],
    scoring: Scoring,
    sinks: Float[Array, " H"] | None = None,
) -> tuple[Float[Array, "B S H E"], LayerCache]:
    """Adds S tokens of each sequence to the cache, and lets them attend to it.

    Args:
        q: Queries of the new tokens; H is a multiple of HK (grouped-query attention).
        k: Keys of the new tokens.
        v: Values of the new tokens.
        cache: The tokens before.
        place: Number of tokens before of each sequence, whose first new token has this
            place in the cache. Padding comes after the new tokens. Its output means
            nothing, and further tokens take its places before they are attended to.
        scoring: Settings of the scores.
        sinks: See `packed_attention`.

    Returns:
        The output of attention, and the cache with the new tokens.
    """
    cache = LayerCache(_put(cache.keys, k, place), _put(cache.values, v, place))
    num_rows, num_new, _, head_dim = q.shape
    num_kv_heads, num_tokens = cache.keys.shape[1:3]
    grouped = q.reshape(num_rows, num_new, num_kv_heads, -1, head_dim)
    scores = jnp.einsum(
        "bsgre,bgce->bgrsc", grouped, cache.keys, preferred_element_type=jnp.float32
    )
    scores = softcap(scores * scoring.scale_of(head_dim), scoring.softcap)
    own = place[:, None] + jnp.arange(num_new)
    back = own[:, :, None] - jnp.arange(num_tokens)
    mask = back >= 0
    if scoring.window is not None:
        mask &= back < scoring.window
    scores = jnp.where(mask[:, None, None], scores, _MASKED)
    if sinks is not None:
        own_sink = sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1, 1)
        own_sink = jnp.broadcast_to(own_sink, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, own_sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :num_tokens]
    out = jnp.einsum("bgrsc,bgce->bsgre", weights.astype(v.dtype), cache.values)
    return out.reshape(q.shape), cache


def _put(
    cached: Float[Array, "B HK C E"],
    new: Float[Array, "B S HK E"],
    place: Int[Array, " B"],
) -> Float[Array, "B HK C E"]:
    def put(cached, new, place):
        return jax.lax.dynamic_update_slice(cached, new, (0, place, 0))

    return jax.vmap(put)(cached, new.swapaxes(1, 2), place)

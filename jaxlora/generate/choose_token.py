"""Chooses the next token of each sequence from its logits."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def choose_tokens(
    logits: Float[Array, "B V"],
    seeds: Int[Array, " B"],
    step: Int[Array, " B"],
    temperature: Float[Array, " B"],
    top_p: Float[Array, " B"],
    top_k: Int[Array, " B"],
) -> Int[Array, " B"]:
    """Chooses a token for each sequence.

    The random numbers of a sequence are a function of its seed and its step alone, and
    its token depends on nothing of the others. What no sequence asks for is skipped.

    Args:
        logits: Logits of the next token, in float32.
        seeds: Random seed of each sequence.
        step: Number of tokens of each sequence that were generated before.
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_p: See `nucleus`, which is that of the tokens that `top_k` leaves; 1: all.
        top_k: See `most_likely`; 0: all.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_drawn = temperature > 0
    has_nucleus, has_most = is_drawn & (top_p < 1), is_drawn & (top_k > 0)

    def restrict(scaled):
        is_kept = most_likely(scaled, top_k) | ~has_most[:, None]
        scaled = jnp.where(is_kept, scaled, -jnp.inf)
        is_kept = nucleus(scaled, top_p) | ~has_nucleus[:, None]
        return jnp.where(is_kept, scaled, -jnp.inf)

    def draw(seed, step, logits):
        key = jax.random.fold_in(jax.random.key(seed), step)
        return jax.random.categorical(key, logits)

    def draw_all(logits):
        scaled = logits / jnp.where(is_drawn, temperature, 1)[:, None]
        is_restricted = (has_nucleus | has_most).any()
        scaled = jax.lax.cond(is_restricted, restrict, lambda x: x, scaled)
        drawn = jax.vmap(draw)(seeds, step, scaled).astype(jnp.int32)
        return jnp.where(is_drawn, drawn, greedy)

    return jax.lax.cond(is_drawn.any(), draw_all, lambda _: greedy, logits)


def nucleus(
    logits: Float[Array, "B V"], top_p: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """Marks the smallest set of tokens whose probabilities add up to `top_p`.

    This is nucleus sampling (arXiv 1904.09751, section 3.1). Tokens that are exactly as
    likely as the last one are marked, too.
    """
    likely = jax.nn.softmax(logits, axis=-1)

    def is_enough(mask):
        return jnp.sum(likely, axis=-1, where=mask) >= top_p

    return _fewest(likely, is_enough)


def most_likely(
    logits: Float[Array, "B V"], top_k: Int[Array, " B"]
) -> Bool[Array, "B V"]:
    """Marks the `top_k` most likely tokens, and those as likely as the last of them."""
    likely = jax.nn.softmax(logits, axis=-1)
    return _fewest(likely, lambda mask: mask.sum(axis=-1) >= top_k)


def _fewest(
    likely: Float[Array, "B V"],
    is_enough: Callable[[Bool[Array, "B V"]], Bool[Array, " B"]],
) -> Bool[Array, "B V"]:
    """Marks the fewest of the most likely tokens that are enough.

    Floats that are not negative have the order of their bits as integers. So 31
    halvings find the least probability that is marked. A sort would take far longer.
    """
    bits = jax.lax.bitcast_convert_type(likely, jnp.int32)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        enough = is_enough(bits >= middle[:, None])
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros(len(likely), jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, bits.max(axis=-1) + 1))
    return bits >= low[:, None]

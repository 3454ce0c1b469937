"""Chooses the next token of each sequence from its logits."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# `nucleus` reads the logits many times, which the others need not.
Method = Literal["greedy", "sample", "nucleus"]


def method_of(temperature: float, top_p: float) -> Method:
    """Returns the cheapest method that respects both settings."""
    if temperature == 0:
        return "greedy"
    return "sample" if top_p == 1 else "nucleus"


def choose_tokens(
    logits: Float[Array, "B V"],
    method: Method,
    seeds: Int[Array, " B"],
    step: Int[Array, ""],
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
) -> Int[Array, " B"]:
    """Chooses a token for each sequence.

    The random numbers of a sequence are a function of its seed and the step alone.

    Args:
        logits: Logits of the next token, in float32.
        method: How to choose.
        seeds: Random seed of each sequence.
        step: Number of tokens that were generated before.
        temperature: Divisor of the logits; not used by `greedy`.
        top_p: See `nucleus`.
    """
    if method == "greedy":
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scaled = logits / temperature
    if method == "nucleus":
        scaled = jnp.where(nucleus(scaled, top_p), scaled, -jnp.inf)

    def draw(seed, logits):
        key = jax.random.fold_in(jax.random.key(seed), step)
        return jax.random.categorical(key, logits)

    return jax.vmap(draw)(seeds, scaled).astype(jnp.int32)


def nucleus(logits: Float[Array, "B V"], top_p: Float[Array, ""]) -> Bool[Array, "B V"]:
    """Marks the smallest set of tokens whose probabilities add up to `top_p`.

    This is nucleus sampling (arXiv 1904.09751, section 3.1). Tokens that are exactly as
    likely as the last one are marked, too.
    """
    likely = jax.nn.softmax(logits, axis=-1)
    # Floats that are not negative have the order of their bits as integers. So 31
    # halvings find the least probability in the nucleus. A sort would take far longer.
    bits = jax.lax.bitcast_convert_type(likely, jnp.int32)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        total = jnp.sum(likely, axis=-1, where=bits >= middle[:, None])
        is_enough = total >= top_p
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle)

    low = jnp.zeros(len(logits), jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, bits.max(axis=-1) + 1))
    return bits >= low[:, None]

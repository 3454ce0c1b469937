"""Counter-based dropout masks: a pure function of who the element is.

An element's bits come from hashing its counter, as in Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3" (SC 2011). So a mask does not depend on packing, on
neighbours or on layout, and the backward pass makes it again instead of keeping it.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, UInt


@typing.no_type_check  # JAX rebuilds it around things that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """The dropout of one projection, for every adapter of the pack.

    Attributes:
        key: Two words a slot that name (job seed, optimiser step, layer,
            projection); see `dropout_keys`.
        rate: Probability of dropping a feature, by slot.
        token_index: The token's own index in its job's global batch.
    """

    key: UInt[Array, "G 2"]
    rate: Float[Array, " G"]
    token_index: Int[Array, " T"]


def _mix(h: UInt[Array, "*B"]) -> UInt[Array, "*B"]:
    """The `lowbias32` finaliser: a bijection of 32-bit words with low bias.

    References:
        Wellons, "Prospecting for Hash Functions", nullprogram.com/blog/2018/07/31.
    """
    h = h ^ (h >> 16)
    h = h * jnp.uint32(0x7FEB352D)
    h = h ^ (h >> 15)
    h = h * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)


def dropout_keys(
    seed: Int[Array, " G"], step: Int[Array, " G"], layer: int, projection: int
) -> UInt[Array, "G 2"]:
    """Two words a slot that differ with seed, step, layer and projection."""
    place = jnp.uint32(layer * 64 + projection + 1)
    words = []
    for salt in (0x9E3779B9, 0x85EBCA6B):
        h = _mix(seed.astype(jnp.uint32) ^ jnp.uint32(salt))
        h = _mix(h + step.astype(jnp.uint32) * jnp.uint32(0xC2B2AE35))
        words.append(_mix(h ^ (place * jnp.uint32(0x27D4EB2F))))
    return jnp.stack(words, axis=-1)


def threshold(rate: Float[Array, "*B"]) -> UInt[Array, "*B"]:
    """The word below which a feature is dropped: `rate * 2**32`."""
    return jnp.round(rate * jnp.float32(1 << 32)).astype(jnp.uint32)


def inverse_keep(rate: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """1 / (probability of keeping)."""
    return 1 / (1 - rate)


def token_words(
    key: UInt[Array, "*#B"], token_index: Integer[Array, "*#B"]
) -> tuple[UInt[Array, "*#B"], UInt[Array, "*#B"]]:
    """An odd multiplier and an offset for each token."""
    h = _mix(token_index.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + key)
    return h | jnp.uint32(1), _mix(h ^ jnp.uint32(0x68E31DA4))


def feature_words(key: UInt[Array, "*B"], num_features: int) -> UInt[Array, "*B K"]:
    """A word for each feature."""
    feature = jnp.arange(num_features, dtype=jnp.uint32) * jnp.uint32(0x85EBCA77)
    return _mix(feature + key[..., None])


def keep_mask(
    key: UInt[Array, "NB 2"],
    rate: Float[Array, " NB"],
    token_index: Int[Array, "NB BT"],
    num_features: int,
) -> Bool[Array, "NB BT K"]:
    """Which features of each token survive, True with probability 1 - rate.

    `multiplier[token] * word[feature] + offset[token]`, modulo 2**32, is compared with
    the rate: one multiply-add a decision, as the kernels need it.

    Args:
        key: The words of each token block's adapter.
        rate: The rate of each token block's adapter.
        token_index: The token's index in its job's global batch.
        num_features: K.

    References:
        Dietzfelbinger, "Universal hashing and k-wise independent random variables via
        integer arithmetic without primes" (STACS 1996).
    """
    multiplier, offset = token_words(key[:, :1], token_index)
    word = feature_words(key[:, 1], num_features)
    bits = multiplier[:, :, None] * word[:, None, :] + offset[:, :, None]
    return bits >= threshold(rate)[:, None, None]

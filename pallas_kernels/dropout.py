"""Counter-based dropout masks: a pure function of who the element is.

An element's bits come from hashing its counter, as in Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3" (SC 2011). So a mask does not depend on packing, on
neighbours or on layout, and the backward pass makes it again instead of keeping it.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

# One hash decides for two neighbouring features, with 16 bits each.
_LEVELS = 1 << 16


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


def _threshold(rate: Float[Array, "*B"]) -> UInt[Array, "*B"]:
    return jnp.round(rate * _LEVELS).astype(jnp.uint32)


def inverse_keep(rate: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """1 / (probability of keeping), for the rate as it is rounded to 16 bits."""
    return _LEVELS / (_LEVELS - _threshold(rate).astype(jnp.float32))


def keep_mask(
    key: UInt[Array, "NB 2"],
    rate: Float[Array, " NB"],
    token_index: Int[Array, "NB BT"],
    num_features: int,
) -> Bool[Array, "NB BT K"]:
    """Which features of each token survive, True with probability 1 - rate.

    Args:
        key: The words of each token block's adapter.
        rate: The rate of each token block's adapter.
        token_index: The token's index in its job's global batch.
        num_features: K.
    """
    token = token_index.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    token = _mix(token + key[:, :1])
    pair = jnp.arange((num_features + 1) // 2, dtype=jnp.uint32)
    pair = pair * jnp.uint32(0x85EBCA77) + key[:, 1:]
    bits = _mix(token[:, :, None] ^ pair[:, None, :])
    halves = jnp.stack([bits & 0xFFFF, bits >> 16], axis=-1)
    halves = halves.reshape(*token_index.shape, -1)[:, :, :num_features]
    return halves >= _threshold(rate)[:, None, None]

"""Counter-based dropout masks: a pure function of each element's identity.

An element's bits are a hash of its counter, as in Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3" (SC 2011). So a mask does not depend on packing, on other
adapters or on layout, and the backward pass recomputes it instead of keeping it.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped, UInt


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskWords:
    """The random words of the dropout masks of P projections with the same K.

    Attributes:
        token: Multipliers and offsets of the tokens, in blocks of 64.
        feature: Words of the features, by slot; or by adapter if a slot is an expert
            with an adapter, `expert * G + adapter`.
        index: Index of this projection among the P.
    """

    token: UInt[Array, "P NB 2 64"]
    feature: UInt[Array, "P G K"]
    index: Int[Array, " 1"]


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """The dropout of one projection, for all slots.

    Attributes:
        key: Two words per slot that identify (job seed, optimizer step, layer,
            projection); see `dropout_keys`. None if there are `words`.
        rate: Probability of dropping a feature, by slot.
        token_index: The token's own index in its job's global batch.
        words: The words that kernels compute from key and token_index, computed for
            many projections at once by `mask_words`; None: they compute their own.
        first_feature: Number of x's first feature among those of all devices that have
            a part of them; None: 0. It is read for experts; others have `words`.
    """

    key: UInt[Array, "G 2"] | None
    rate: Float[Array, " G"]
    token_index: Int[Array, " T"]
    words: MaskWords | None = None
    first_feature: Int[Array, ""] | int | None = None

    @property
    def inverse_keep(self) -> Float[Array, " G"]:
        """Factor of the kept features, by slot."""
        return inverse_keep(self.rate)

    def keep(
        self, slot: Int[Array, " NB"], shape: tuple[int, ...]
    ) -> Bool[Array, "NB BT K"]:
        """Returns which features are kept, by token block.

        Args:
            slot: Slot of each token block.
            shape: (T, K) of x.
        """
        if self.words is None:
            token_index = self.token_index.reshape(slot.shape[0], -1)
            key = self.given_key()[slot]
            return keep_mask(key, self.rate[slot], token_index, shape[1])
        index = self.words.index[0]
        token, feature = (
            entries(table, index) for table in (self.words.token, self.words.feature)
        )
        num_blocks, num_tokens = slot.shape[0], shape[0]
        multiplier, offset = (
            token[:, i].reshape(-1)[:num_tokens].reshape(num_blocks, -1) for i in (0, 1)
        )
        row = slot
        if (
            feature.shape[0] < self.rate.shape[0]
        ):  # the experts share an adapter's words
            row = jax.lax.rem(slot, jnp.int32(feature.shape[0]))
        word = entries(feature[:, : shape[1]], row)
        return _is_kept(multiplier, offset, word, entries(threshold(self.rate), slot))

    def given_key(self) -> UInt[Array, "G 2"]:
        """Returns the key.

        Raises:
            ValueError: There is none.
        """
        if self.key is None:
            raise ValueError(
                "dropout has neither a key nor words made beforehand. Give the key of "
                "dropout_keys, or the words of mask_words."
            )
        return self.key


def entries(
    table: Shaped[Array, "N ..."], index: Int[Array, "..."] | np.integer
) -> Array:
    """Returns the entries at indices that are known to be from 0 to N - 1.

    `table[index]` would also provide for negative ones, which makes half of the
    operations of a linear in plain JAX.
    """
    if not isinstance(index, jax.Array) or index.ndim != 1:
        at = table.at[index]
        return at.get(mode="promise_in_bounds", wrap_negative_indices=False)
    # `at` would make the same operation, and takes four times as long to trace it.
    return jax.lax.gather(
        table,
        jax.lax.expand_dims(index, (1,)),
        jax.lax.GatherDimensionNumbers(
            offset_dims=tuple(range(1, table.ndim)),
            collapsed_slice_dims=(0,),
            start_index_map=(0,),
        ),
        slice_sizes=(1, *table.shape[1:]),
        mode="promise_in_bounds",
    )


# Words are stored in the tiles in which the fused kernels read them.
TILE_TOKENS, TILE_FEATURES = 64, 256


def _mix(h: UInt[Array, "*B"]) -> UInt[Array, "*B"]:
    """Applies the `lowbias32` finaliser, a bijection of 32-bit words with low bias.

    References:
        Wellons, "Prospecting for Hash Functions", nullprogram.com/blog/2018/07/31.
    """
    h = h ^ (h >> 16)
    h = h * jnp.uint32(0x7FEB352D)
    h = h ^ (h >> 15)
    h = h * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)


def dropout_keys(
    seed: Int[Array, " G"],
    step: Int[Array, " G"],
    layer: int | Int[Array | np.ndarray, "P 1"],
    projection: int | Int[np.ndarray, "P 1"],
) -> UInt[Array, "*#P G 2"]:
    """Returns two words per slot that differ with seed, step, layer and projection."""
    linear = jnp.asarray(layer * 64 + projection + 1, jnp.uint32)
    words = []
    for salt in (0x9E3779B9, 0x85EBCA6B):
        h = _mix(seed.astype(jnp.uint32) ^ jnp.uint32(salt))
        h = _mix(h + step.astype(jnp.uint32) * jnp.uint32(0xC2B2AE35))
        words.append(_mix(h ^ (linear * jnp.uint32(0x27D4EB2F))))
    return jnp.stack(words, axis=-1)


def threshold(rate: Float[Array, "*B"]) -> UInt[Array, "*B"]:
    """Returns the word below which a feature is dropped, `rate * 2**32`."""
    return jnp.round(rate * jnp.float32(1 << 32)).astype(jnp.uint32)


def inverse_keep(rate: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Returns `1 / (1 - rate)`."""
    return 1 / (1 - rate)


def token_words(
    key: UInt[Array, "*#B"], token_index: Integer[Array, "*#B"]
) -> tuple[UInt[Array, "*#B"], UInt[Array, "*#B"]]:
    """Returns an odd multiplier and an offset for each token."""
    h = _mix(token_index.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + key)
    return h | jnp.uint32(1), _mix(h ^ jnp.uint32(0x68E31DA4))


def feature_words(
    key: UInt[Array, "*B"], num_features: int, first: Int[Array, ""] | int = 0
) -> UInt[Array, "*B K"]:
    """Returns a word for each feature, from a first one on."""
    feature = jnp.arange(num_features, dtype=jnp.uint32)
    if not isinstance(first, int) or first:
        feature += jnp.asarray(first, jnp.uint32)
    feature *= jnp.uint32(0x85EBCA77)
    return _mix(feature + key[..., None])


def mask_words(
    key: UInt[Array, "P G 2"],
    block_adapter: Int[Array, " NB"],
    token_index: Int[Array, " T"],
    num_features: int,
    *,
    first_feature: Int[Array, ""] | int = 0,
) -> list[MaskWords]:
    """Computes the words of P projections; returns one object for each.

    Args:
        key: The words of `dropout_keys`.
        block_adapter: Slot of each token block; -1 for padding.
        token_index: The token's index in its job's global batch.
        num_features: K.
        first_feature: Index of the first of them, if they are a part of all features.
    """
    num_tokens = token_index.shape[0]
    pad = 0, -num_tokens % TILE_TOKENS  # the tiles are whole
    num_features = -(-num_features // TILE_FEATURES) * TILE_FEATURES
    slot = jnp.repeat(
        jnp.maximum(block_adapter, 0), num_tokens // block_adapter.shape[0]
    )
    index = jnp.pad(token_index, pad).reshape(-1, TILE_TOKENS)
    token_key = key[:, jnp.pad(slot, pad).reshape(index.shape), 0]
    token = jnp.stack(token_words(token_key, index), axis=2)
    feature = feature_words(key[..., 1], num_features, first_feature)
    indices = np.arange(key.shape[0], dtype=np.int32)[:, None]
    return [MaskWords(token, feature, jnp.asarray(index)) for index in indices]


def expert_mask_words(
    key: UInt[Array, "G 2"],
    block_slot: Int[Array, " NB"],
    token_index: Int[Array, " S"],
    num_experts: int,
    num_features: int,
    first_expert: Int[Array, ""] | int = 0,
    first_feature: Int[Array, ""] | int = 0,
) -> MaskWords:
    """Computes the words of a linear of experts, whose mask depends on the expert, too.

    The words of the tokens differ by expert, and those of the features do not, as a
    table of them for each expert and adapter would be large.

    Args:
        key: The words of `dropout_keys` of each adapter.
        block_slot: Slot of each block of rows, `expert * G + adapter`; -1 for padding.
        token_index: The index of each row's token in its job's global batch.
        num_experts: X.
        num_features: K.
        first_expert: Number of the first of them among all experts of the layer.
        first_feature: Number of the first feature among those of all devices.
    """
    number = jnp.arange(1, num_experts + 1, dtype=jnp.uint32)
    number += jnp.asarray(first_expert, jnp.uint32)
    expert = number * jnp.uint32(0x9E3779B1)
    of_slot = _mix(key[:, 0] ^ _mix(expert)[:, None]).reshape(-1)
    slot_key = jnp.stack([of_slot, of_slot], axis=1)[None]
    (words,) = mask_words(slot_key, block_slot, token_index, 0)
    num_features = -(-num_features // TILE_FEATURES) * TILE_FEATURES
    feature = feature_words(key[None, :, 1], num_features, first_feature)
    return dataclasses.replace(words, feature=feature)


def keep_mask(
    key: UInt[Array, "NB 2"],
    rate: Float[Array, " NB"],
    token_index: Int[Array, "NB BT"],
    num_features: int,
) -> Bool[Array, "NB BT K"]:
    """Returns which features of each token are kept, with probability 1 - rate.

    A feature is kept if `multiplier[token] * word[feature] + offset[token]`, modulo
    2**32, is at least `threshold(rate)`. Kernels need one multiply-add per element.

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
    return _is_kept(multiplier, offset, word, threshold(rate))


def _is_kept(
    multiplier: UInt[Array, "NB BT"],
    offset: UInt[Array, "NB BT"],
    word: UInt[Array, "NB K"],
    least: UInt[Array, " NB"],
) -> Bool[Array, "NB BT K"]:
    multiplier, offset = (jnp.expand_dims(x, 2) for x in (multiplier, offset))
    bits = multiplier * jnp.expand_dims(word, 1) + offset
    return bits >= jnp.expand_dims(least, (1, 2))

"""Dropout masks that the caller gives, stored with one bit per element of x.

A word holds 32 tokens of one feature, so a mask is packed by a reduction over rows,
which reads and writes memory in its order. The kernels load the two words of a feature
and of a block of 64 tokens, and test one bit per element.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxlora.pallas_kernels.dropout import TILE_TOKENS

WORDS = 2  # words of a feature in a block of 64 tokens
_GROUP = 8  # consecutive tokens in one word
# Elements that are packed together. XLA may not fuse the sum of a larger mask with what
# draws it, and then writes eight bytes per element: 117 million of them took 0.87 ms on
# an H200, and 0.53 where they were fused.
_PIECE = 2**25
_TOKENS = np.arange(TILE_TOKENS, dtype=np.uint32)


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GivenMask:
    """The dropout of one projection, as a mask that the caller has drawn.

    Attributes:
        bits: Which features of each token are kept; see `pack_mask`. W is twice the
            number of blocks of 64 tokens, T / 64 rounded up.
        inverse_keep: Factor of the kept features, by slot: 1 over the probability of
            keeping one, for inverted dropout.
    """

    bits: UInt[Array, "W K"]
    inverse_keep: Float[Array, " G"]

    def keep(
        self, slot: Int[Array, " NB"], shape: tuple[int, ...]
    ) -> Bool[Array, "NB BT K"]:
        """Returns which features are kept, by token block; see `Dropout.keep`."""
        num_tokens, num_features = shape
        kept = unpack_mask(self.bits, num_tokens)
        return kept.reshape(slot.shape[0], -1, num_features)


def num_words(num_tokens: int) -> int:
    """Returns the number of words per feature, W."""
    return -(-num_tokens // TILE_TOKENS) * WORDS


def bit_of_token(token):
    """Returns the (word, bit) of each token of a block of 64, as unsigned integers.

    The words take turns at groups of eight tokens. In the tiles of the tensor cores, a
    thread has two rows of a block, eight rows apart. So these have the same bit in
    different words.

    Args:
        token: Index of each token in its block, unsigned.
    """
    group = token // _GROUP
    return group % WORDS, group // WORDS * _GROUP + token % _GROUP


def token_masks() -> UInt[np.ndarray, "2 64"]:
    """Returns, for each word, the bits of its own tokens, and 0 for the other's."""
    word, bit = bit_of_token(_TOKENS)
    return np.where(
        word == np.arange(WORDS)[:, None], np.uint32(1) << bit, np.uint32(0)
    )


def pack_mask(kept: Bool[Array, "T K"]) -> UInt[Array, "W K"]:
    """Packs a mask to one bit per element; XLA fuses it with what computes the mask.

    Token `64 i + 16 j + 8 h + l` of a feature, with h below 2 and l below 8, is bit
    `8 j + l` of word `2 i + h` of the same feature; the lowest bit is bit 0. Bits of
    tokens beyond T are 0.

    Args:
        kept: Whether each feature of each token is kept.
    """
    num_tokens, num_features = kept.shape
    blocks = num_words(num_tokens) // WORDS
    kept = jnp.pad(kept, [(0, blocks * TILE_TOKENS - num_tokens), (0, 0)])
    groups = kept.reshape(blocks, -1, WORDS, _GROUP, num_features)
    bit = bit_of_token(_TOKENS)[1].reshape(1, -1, WORDS, _GROUP, 1)
    step = -(-blocks // -(-kept.size // _PIECE))
    words = [
        (groups[i : i + step].astype(jnp.uint32) << bit).sum(
            axis=(1, 3), dtype=bit.dtype
        )
        for i in range(0, blocks, step)
    ]
    return jnp.concatenate(words).reshape(-1, num_features)


def unpack_mask(bits: UInt[Array, "W K"], num_tokens: int) -> Bool[Array, "T K"]:
    """Returns which features of each token are kept; reverses `pack_mask`.

    Args:
        bits: The packed mask.
        num_tokens: T.
    """
    word, bit = bit_of_token(_TOKENS)
    words = bits.reshape(-1, WORDS, bits.shape[1])[:, word]
    kept = (words >> bit[:, None]) & 1
    return kept.reshape(-1, bits.shape[1])[:num_tokens] != 0

"""Dropout masks of tiles in a kernel: recomputed from words, or read from bits.

`HashMask` is the mask of `dropout.keep_mask`: an element is kept where
`multiplier[token] * word[feature] + offset[token]`, modulo 2**32, is at least a
threshold. `BitMask` is a `given_mask.GivenMask`: an element is kept where its bit is 1.
Both compute a tile's mask from vectors of its tokens and of its features, which are
copied to shared memory with the tile or made before it. See docs/hopper_kernels.md.
"""

import dataclasses
import typing
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxlora.pallas_kernels.dropout import MaskWords
from jaxlora.pallas_kernels.given_mask import WORDS, GivenMask, bit_of_token
from jaxlora.pallas_kernels.mosaic.ring import COMPUTE_WGS, ROWS, STEP, Ref, zeros_like

# Layouts of a vector with one value for each row, or column, of a tile.
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class MaskTiles:
    """Shapes of the words of one mask in shared memory.

    Attributes:
        shrink: Those that come with a stage of shrink.
        outer: Those that come with a stage of outer.
        expand: Those that come with an output tile of expand; None is the number of
            columns of the tile.
        num_expand_copies: Copies that fill those of an output tile.
    """

    shrink: tuple[int, ...]
    outer: tuple[int, ...]
    expand: tuple[tuple[int | None, ...], ...]
    num_expand_copies: int


class Vectors(typing.NamedTuple):
    """The vectors from which the mask of a tile of 64 x 64 is computed.

    Attributes:
        tokens: Vectors with one value for each token.
        features: Vectors with one value for each feature.
    """

    tokens: tuple
    features: tuple


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HashMask:
    """Mask words of P projections: arrays outside a kernel, references inside.

    Attributes:
        tokens: Multipliers and offsets of the tokens, [P, NB, 2, 64], by block of 64
            rows, uint32.
        features: Words of the features, [P, G, K], by slot, uint32; see `is_shared`.
        index: Index of this projection among the P, [1], int32; None after `select`,
            when tokens and features are of this projection alone.
        is_shared: Whether a slot is an expert with an adapter, `expert * G + adapter`,
            and the experts share the adapter's words of the features.
    """

    tokens: Ref
    features: Ref
    index: Ref
    is_shared: bool = dataclasses.field(default=False, metadata={"static": True})

    tiles: ClassVar[MaskTiles] = MaskTiles(
        shrink=(COMPUTE_WGS * STEP,),
        outer=(2, ROWS),
        expand=((COMPUTE_WGS, None), (COMPUTE_WGS, 2, ROWS)),
        num_expand_copies=2 * COMPUTE_WGS,
    )

    def select(self) -> "HashMask":
        """Returns this projection's words. Only for use in a kernel."""
        index = self.index[0]
        tokens, features = self.tokens.at[index], self.features.at[index]
        return HashMask(tokens, features, None, self.is_shared)

    def _features(self, slot, columns) -> Ref:
        """Returns the words of a slot's features, in device memory."""
        num_rows = jnp.int32(self.features.shape[0])
        row = lax.rem(slot, num_rows) if self.is_shared else slot
        return self.features.at[row, columns]

    def threshold(self, settings, slot):
        """Returns the word below which a slot's elements are dropped."""
        return settings.threshold[slot]

    def shrink_words(self, block, slot, columns) -> Ref:
        """Returns the words that come with a stage of shrink, in device memory."""
        del block
        return self._features(slot, columns)

    def shrink_tokens(self, block) -> tuple:
        """Makes the vectors of a block's tokens, one value for each row."""
        return _load_pair(self.tokens.at[block], PER_ROW)

    def shrink_features(self, words_smem: Ref, stage, p, wg) -> tuple:
        """Makes the vectors of a warpgroup's 64 features, one value for each column."""
        words = words_smem.at[stage, p, pl.ds(wg * STEP, STEP)]
        return (load_words(words, PER_COLUMN),)

    def outer_words(self, block, columns) -> Ref:
        """Returns the words that come with a stage of outer, in device memory."""
        del columns
        return self.tokens.at[block]

    def outer_features(self, slot, columns) -> tuple:
        """Makes the vectors of 64 features that are the same for a whole part."""
        return (load_words(self._features(slot, columns), PER_ROW),)

    def outer_vectors(self, words_smem: Ref, stage, p, wg, features) -> Vectors:
        """Makes the vectors of a stage of outer, where tokens are columns."""
        del wg
        return Vectors(_load_pair(words_smem.at[stage, p], PER_COLUMN), features)

    def copy_expand_words(self, words_smem, p, slots, block, num_blocks, columns, full):
        """Copies the words of projection p's mask of an output tile."""
        features_smem, tokens_smem = words_smem
        for wg, slot in enumerate(slots):
            features = self._features(jnp.maximum(slot, 0), columns)
            plgpu.copy_gmem_to_smem(features, features_smem.at[p, wg], full)
            # A tile's second half may lie outside.
            inside = jnp.minimum(block + wg, num_blocks - 1)
            tokens = self.tokens.at[inside]
            plgpu.copy_gmem_to_smem(tokens, tokens_smem.at[p, wg], full)

    def expand_vectors(self, words_smem, p, wg, columns) -> Vectors:
        """Makes the vectors of 64 columns of an output tile."""
        features_smem, tokens_smem = words_smem
        tokens = _load_pair(tokens_smem.at[p, wg], PER_ROW)
        features = load_words(features_smem.at[p, wg, columns], PER_COLUMN)
        return Vectors(tokens, (features,))

    def is_kept(self, vectors: Vectors, threshold, shape, token_axis: int):
        """Returns which elements of a tile are kept."""
        (multiplier, offset), (word,) = _spread(vectors, shape, token_axis)
        return multiplier * word + offset >= threshold


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BitMask:
    """The bits of one projection's mask: an array outside a kernel, a reference inside.

    Its methods are described in `HashMask`. The vectors of the features are the two
    words of each, and those of the tokens have the token's bit set in the vector of the
    token's word.

    Attributes:
        bits: Bits by token block and feature, [2 NB, K], uint32; see `pack_mask`.
    """

    bits: Ref

    tiles: ClassVar[MaskTiles] = MaskTiles(
        shrink=(WORDS, COMPUTE_WGS * STEP),
        outer=(WORDS, COMPUTE_WGS * STEP),
        expand=((COMPUTE_WGS * WORDS, None),),
        num_expand_copies=1,
    )

    def select(self) -> "BitMask":
        return self

    def threshold(self, settings, slot) -> None:
        del settings, slot

    def shrink_words(self, block, slot, columns) -> Ref:
        del slot
        return self.bits.at[pl.ds(block * WORDS, WORDS), columns]

    def shrink_tokens(self, block) -> tuple:
        del block
        return _token_masks(PER_ROW)

    def shrink_features(self, words_smem: Ref, stage, p, wg) -> tuple:
        words = words_smem.at[stage, p, :, pl.ds(wg * STEP, STEP)]
        return _load_pair(words, PER_COLUMN)

    def outer_words(self, block, columns) -> Ref:
        return self.bits.at[pl.ds(block * WORDS, WORDS), columns]

    def outer_features(self, slot, columns) -> tuple:
        del slot, columns
        return ()

    def outer_vectors(self, words_smem: Ref, stage, p, wg, features) -> Vectors:
        del features
        words = words_smem.at[stage, p, :, pl.ds(wg * STEP, STEP)]
        return Vectors(_token_masks(PER_COLUMN), _load_pair(words, PER_ROW))

    def copy_expand_words(self, words_smem, p, slots, block, num_blocks, columns, full):
        del slots, num_blocks
        (bits_smem,) = words_smem
        rows = pl.ds(block * WORDS, COMPUTE_WGS * WORDS)
        bits = self.bits.at[rows, columns]
        plgpu.copy_gmem_to_smem(bits, bits_smem.at[p], full)

    def expand_vectors(self, words_smem, p, wg, columns) -> Vectors:
        (bits_smem,) = words_smem
        words = bits_smem.at[p, pl.ds(wg * WORDS, WORDS), columns]
        return Vectors(_token_masks(PER_ROW), _load_pair(words, PER_COLUMN))

    def is_kept(self, vectors: Vectors, threshold, shape, token_axis: int):
        del threshold
        masks, words = _spread(vectors, shape, token_axis)
        first, second = (mask & word for mask, word in zip(masks, words, strict=True))
        return (first | second) != jnp.uint32(0)


Mask = HashMask | BitMask


def make_mask(source: MaskWords | GivenMask, num_slots: int = 0) -> Mask:
    """Makes the mask of a projection from its words or bits.

    Args:
        source: The words or bits.
        num_slots: Number of slots, if it may be larger than that of the features' rows.
    """
    if isinstance(source, GivenMask):
        return BitMask(source.bits)
    is_shared = source.feature.shape[1] < num_slots
    return HashMask(source.token, source.feature, source.index, is_shared)


def load_words(words: Ref, layout):
    """Loads 64 words, one for each row or column of a tile; see `PER_ROW`."""
    return plgpu.load(words, layout=layout, optimized=False)


def _load_pair(words: Ref, layout) -> tuple:
    """Loads two vectors of 64 words from [2, 64]."""
    return load_words(words.at[0], layout), load_words(words.at[1], layout)


def _token_masks(layout) -> tuple:
    """Makes, for each of the two words, the bits of its own tokens and 0 elsewhere."""
    token = plgpu.broadcasted_iota(jnp.uint32, (ROWS,), 0, layout=layout)
    word, bit = bit_of_token(token)
    mask = lax.shift_left(jnp.full_like(bit, 1), bit)
    return tuple(jnp.where(word == i, mask, zeros_like(mask)) for i in range(WORDS))


def _spread(vectors: Vectors, shape, token_axis: int) -> Vectors:
    """Broadcasts the vectors to a tile."""

    def spread(all_of, axis):
        return tuple(lax.broadcast_in_dim(one, shape, (axis,)) for one in all_of)

    tokens = spread(vectors.tokens, token_axis)
    return Vectors(tokens, spread(vectors.features, 1 - token_axis))


def apply_mask(x, mask: Mask, vectors: Vectors, threshold: Any, *, token_axis: int = 0):
    """Returns x where the mask keeps it and zero elsewhere.

    Args:
        x: Values in registers, [64 tokens, 64 features].
        mask: The mask.
        vectors: Its vectors for the tokens and features of x.
        threshold: Its threshold for the slot of x.
        token_axis: 1 if x is [64 features, 64 tokens].
    """
    kept = mask.is_kept(vectors, threshold, x.shape, token_axis)
    return jnp.where(kept, x, zeros_like(x))

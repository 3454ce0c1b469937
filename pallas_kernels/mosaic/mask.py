"""Recomputes the mask of `dropout.keep_mask` inside a kernel from its random words."""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxlora.pallas_kernels.dropout import Dropout, mask_words
from jaxlora.pallas_kernels.mosaic.ring import zeros_like
from jaxlora.pallas_kernels.mosaic.routing import Blocks

OF_ROW = plgpu.Layout.WGMMA.reduce(1)
OF_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@typing.no_type_check  # JAX rebuilds it around things that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """The inputs of a mask: arrays outside of a kernel, references inside.

    Attributes:
        token: The tokens' multipliers and offsets, by block of 64 rows, P NB 2 64.
        word: Words of the features, by slot, P G K.
        place: Index of this mask among the P, 1; None: token and word hold only it.
    """

    token: Any
    word: Any
    place: Any

    def here(self) -> "Mask":
        """Selects this mask from the P. Only for use in a kernel: it reads `place`."""
        place = self.place[0]
        token, word = self.token.at[place], self.word.at[place]
        return Mask(token, word, None)


def mask_of(dropout: Dropout, blocks: Blocks, num_features: int) -> Mask:
    """Makes the mask of a projection with `num_features` input features."""
    words = dropout.words
    if words is None:
        own = dropout.given_key()[None], blocks.slot, dropout.token_index
        (words,) = mask_words(*own, num_features)
    return Mask(words.token, words.feature, words.place)


def load_line(ref, layout):
    """Loads 64 words, laid out along the rows (`OF_ROW`) or columns of a tile."""
    return plgpu.load(ref, layout=layout, optimized=False)


def load_tokens(ref, layout) -> tuple:
    """Loads (multipliers, offsets) of 64 tokens."""
    return load_line(ref.at[0], layout), load_line(ref.at[1], layout)


def dropped(x, tokens, features, threshold, *, token_axis: int = 0):
    """x [64 tokens, 64 features] where the mask keeps it, else zero.

    Args:
        x: The values.
        tokens: (multipliers, offsets) of the tokens.
        features: Words of the features.
        threshold: Drop below this.
        token_axis: 1: x is [64 features, 64 tokens].
    """
    multiplier, offset = (
        lax.broadcast_in_dim(z, x.shape, (token_axis,)) for z in tokens
    )
    word = lax.broadcast_in_dim(features, x.shape, (1 - token_axis,))
    return jnp.where(multiplier * word + offset >= threshold, x, zeros_like(x))

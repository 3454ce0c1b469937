"""Recomputes the dropout mask of `dropout.keep_mask` in a kernel from its words.

An element is kept where `multiplier[token] * word[feature] + offset[token]`, modulo
2**32, is at least a threshold. See docs/kernels.md.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxlora.pallas_kernels.dropout import MaskWords
from jaxlora.pallas_kernels.mosaic.ring import Ref, zeros_like

# Layouts of a vector with one value for each row, or column, of a tile.
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Mask words of P projections: arrays outside a kernel, references inside.

    Attributes:
        tokens: Multipliers and offsets of the tokens, [P, NB, 2, 64], by block of 64
            rows, uint32.
        features: Words of the features, [P, G, K], by slot, uint32.
        index: Index of this projection among the P, [1], int32; None after `select`,
            when tokens and features are of this projection alone.
    """

    tokens: Ref
    features: Ref
    index: Ref

    def select(self) -> "Mask":
        """Returns this projection's words. Only for use in a kernel."""
        index = self.index[0]
        return Mask(self.tokens.at[index], self.features.at[index], None)


def make_mask(words: MaskWords) -> Mask:
    """Makes the mask of a projection from its words."""
    return Mask(words.token, words.feature, words.index)


def load_words(words: Ref, layout):
    """Loads 64 words, one for each row or column of a tile; see `PER_ROW`."""
    return plgpu.load(words, layout=layout, optimized=False)


def load_token_words(words: Ref, layout) -> tuple:
    """Loads (multipliers, offsets) of 64 tokens from [2, 64]."""
    return load_words(words.at[0], layout), load_words(words.at[1], layout)


def apply_mask(x, tokens, features, threshold, *, token_axis: int = 0):
    """Returns x where the mask keeps it and zero elsewhere.

    Args:
        x: Values in registers, [64 tokens, 64 features].
        tokens: (multipliers, offsets) of the tokens, 64 each.
        features: Words of the features, 64.
        threshold: An element is dropped if its random word is below.
        token_axis: 1 if x is [64 features, 64 tokens].
    """
    multiplier, offset = (
        lax.broadcast_in_dim(z, x.shape, (token_axis,)) for z in tokens
    )
    word = lax.broadcast_in_dim(features, x.shape, (1 - token_axis,))
    return jnp.where(multiplier * word + offset >= threshold, x, zeros_like(x))

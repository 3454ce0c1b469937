"""The dropout mask of `dropout.keep_mask`, made again inside a kernel."""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dropout import Dropout, feature_words, threshold
from pallas_kernels.mosaic.ring import zeros_like

OF_ROW = plgpu.Layout.WGMMA.reduce(1)
OF_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@typing.no_type_check  # JAX rebuilds it around things that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """What names a mask: arrays outside of a kernel, references inside.

    Attributes:
        key: Two words of each slot, G 2; its tokens' words are made of the first.
        word: Words of the features, G K.
        threshold: Drop below this, G.
        token_index: The token's index in its job's global batch, T.
    """

    key: Any
    word: Any
    threshold: Any
    token_index: Any


def mask_of(dropout: Dropout | None, num_features: int) -> Mask | None:
    """The mask of a projection with (at least) so many input features."""
    if dropout is None:
        return None
    words = feature_words(dropout.key[:, 1], num_features)
    index = dropout.token_index.astype(jnp.uint32)
    return Mask(dropout.key, words, threshold(dropout.rate), index)


def load_line(ref, layout):
    """64 words, laid out along the rows (`OF_ROW`) or columns of a tile."""
    return plgpu.load(ref, layout=layout, optimized=False)


def dropped(x, tokens, features, threshold):
    """x [64 tokens, 64 features] where the mask keeps it, else zero."""
    multiplier, offset = (lax.broadcast_in_dim(z, x.shape, (0,)) for z in tokens)
    bits = multiplier * lax.broadcast_in_dim(features, x.shape, (1,)) + offset
    return jnp.where(bits >= threshold, x, zeros_like(x))


def drop_each(x, spare, parts) -> list:
    """Masked copies of a tile in shared memory, 64 tokens x 64 features.

    Args:
        x: The tile; the first copy takes its place.
        spare: (index) -> where the others go.
        parts: (tokens, features, threshold) of each copy.

    Returns:
        References to the copies.
    """
    value = plgpu.load(x, layout=plgpu.Layout.WGMMA)
    copies = [x, *(spare(i) for i in range(len(parts) - 1))]
    for copy, part in zip(copies, parts, strict=True):
        copy[...] = dropped(value, *part)
    plgpu.commit_smem()
    return copies

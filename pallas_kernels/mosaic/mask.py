"""The dropout mask of `dropout.keep_mask`, made again inside a kernel."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.ring import zeros_like

OF_ROW = plgpu.Layout.WGMMA.reduce(1)
OF_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Mask:
    """References to what names a mask.

    Attributes:
        key: Word of each slot that its tokens' words are made of, G.
        word: Words of the features, G K.
        threshold: Drop below this, G.
        token_index: The token's index in its job's global batch, T.
    """

    key: Any
    word: Any
    threshold: Any
    token_index: Any


def load_line(ref, layout):
    """64 words, laid out along the rows (`OF_ROW`) or columns of a tile."""
    return plgpu.load(ref, layout=layout, optimized=False)


def dropped(x, tokens, features, threshold):
    """x [64 tokens, 64 features] where the mask keeps it, else zero."""
    multiplier, offset = (lax.broadcast_in_dim(z, x.shape, (0,)) for z in tokens)
    bits = multiplier * lax.broadcast_in_dim(features, x.shape, (1,)) + offset
    return jnp.where(bits >= threshold, x, zeros_like(x))


def drop_in_place(ref, tokens, features, threshold) -> None:
    """Drops from a tile in shared memory, 64 tokens x 64 features, before a product."""
    x = plgpu.load(ref, layout=plgpu.Layout.WGMMA)
    ref[...] = dropped(x, tokens, features, threshold)
    plgpu.commit_smem()

"""The outer kernel: the gradient `dA[g] = dropout(x)^T ds` of each slot.

The rows of each slot are split into parts (`pallas_kernels/parts.py`), which programs
sum independently of each other; XLA adds up the parts in a fixed order. The mask is
recomputed from its words.
"""

import math
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float

from jaxlora.pallas_kernels.dropout import MaskWords
from jaxlora.pallas_kernels.parts import Parts, make_parts, sum_parts
from jaxlora.pallas_kernels.routing import Blocks
from jaxlora.pallas_kernels.settings import KernelSettings
from jaxlora.pallas_kernels.triton.device import Target
from jaxlora.pallas_kernels.triton.launch import Tile, launch
from jaxlora.pallas_kernels.triton.tiles import CHUNK, MAX_PARTS, tile_for


@triton.jit
@typing.no_type_check
def outer_kernel(
    x,
    ds,
    order,
    part_slot,
    part_first,
    part_blocks,
    num_parts,
    num_chunks,
    threshold,
    index,
    token,
    feature,
    word_index,
    da,
    T: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    F: tl.constexpr,
    MASKED: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    """Computes one column tile and one chunk of ranks of one part of a slot's rows.

    Args:
        x: [T, K].
        ds: [T, R]; only the chunks are read that the row's slot has.
        order: Blocks of 64 rows sorted by slot, [NB].
        part_slot: Slot of each part.
        part_first: Index in `order` of each part's first block.
        part_blocks: Number of blocks of each part.
        num_parts: Number of parts, [1].
        num_chunks: Number of chunks of 64 ranks of each slot, [P, G].
        threshold: Dropout threshold of each slot, [P, G].
        index: Row of `num_chunks` and `threshold`, [1].
        token: Words of the tokens, [P, T / 64, 2, 64]. Unused if not MASKED, like the
            next two.
        feature: Words of the features, [P, G, F].
        word_index: Index into the first axis of `token` and `feature`, [1].
        da: dropout(x)^T ds by part, [parts, K, R], float32.
        T, K, R, G, F: Sizes.
        MASKED: Whether there is dropout.
        BK: Columns of a tile.
        BR: Ranks of a chunk, at most 64.
    """
    tile, part, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if part < tl.load(num_parts):
        slot = tl.load(part_slot + part)
        first, count = tl.load(part_first + part), tl.load(part_blocks + part)
        settings = tl.load(index) * G + slot
        count = tl.where(chunk < tl.load(num_chunks + settings), count, 0)
        rows, ranks = tl.arange(0, 64), chunk * BR + tl.arange(0, BR)
        columns = tile * BK + tl.arange(0, BK)
        inside = columns < K
        if MASKED:
            words = tl.load(word_index).to(tl.int64)
            limit = tl.load(threshold + settings)
            feature += (words * G + slot) * F
            word = tl.load(feature + columns, mask=inside, other=0)
            token += words * (T // 64) * 128
        total = tl.zeros((BR, BK), tl.float32)
        # Loads whose address was loaded in the same iteration would start a step later.
        following = tl.load(order + first)
        for i in range(count):
            block = following.to(tl.int64)
            following = tl.load(order + first + i + 1, mask=i + 1 < count, other=0)
            ds_at = ds + block * 64 * R + rows[None, :] * R + ranks[:, None]
            x_at = x + block * 64 * K + rows[:, None] * K + columns[None, :]
            ds_tile = tl.load(ds_at)
            if K % BK == 0:
                x_tile = tl.load(x_at)
            else:
                x_tile = tl.load(x_at, mask=inside[None, :], other=0.0)
            if MASKED:
                token_at = token + block * 128 + rows
                multiplier, offset = tl.load(token_at), tl.load(token_at + 64)
                bits = multiplier[:, None] * word[None, :] + offset[:, None]
                x_tile = tl.where(bits >= limit, x_tile, 0.0)
            total = tl.dot(ds_tile, x_tile, total)
        da_at = da + part.to(tl.int64) * K * R + columns[None, :] * R + ranks[:, None]
        tl.store(da_at, total, mask=inside[None, :])


def outer(
    x: Float[Array, "T K"],
    ds: Sequence[Float[Array, "T R"]],
    settings: Sequence[KernelSettings],
    words: Sequence[MaskWords],
    blocks: Blocks,
    *,
    target: Target,
    tile: Tile | None = None,
) -> list[Float[Array, "G K R"]]:
    """Returns dA of each of the projections that share x, in float32.

    Args:
        x: Token rows.
        ds: Gradient of each projection's s; R is 16, 32 or a multiple of 64.
        settings: Settings of each projection.
        words: Words of each projection's mask; empty without dropout.
        blocks: Slots of the rows.
        target: The device for which the kernel is compiled.
        tile: How it is compiled; None: the table's choice.
    """
    tile = tile or tile_for("outer", target, rank=ds[0].shape[1])
    parts = make_parts(blocks, MAX_PARTS)
    each_words = words or [None] * len(ds)
    return [
        sum_parts(_launch_outer(x, *one, blocks, parts, target, tile), parts, MAX_PARTS)
        for one in zip(ds, settings, each_words, strict=True)
    ]


def _launch_outer(
    x,
    ds,
    settings: KernelSettings,
    words: MaskWords | None,
    blocks: Blocks,
    parts: Parts,
    target: Target,
    tile: Tile,
) -> Float[Array, "parts K R"]:
    (t, k), r, table = x.shape, ds.shape[1], parts.table
    chunk, room = min(r, CHUNK), table.slot.shape[0]
    unread = settings.threshold, settings.threshold, settings.index
    inputs: list[Any] = [
        *(x, ds, blocks.order),
        *(table.slot, table.first_block, table.num_blocks, table.num_parts),
        *(settings.num_chunks, settings.threshold, settings.index),
        *((words.token, words.feature, words.index) if words else unread),
    ]
    constants = {
        "T": t,
        "K": k,
        "R": r,
        "G": parts.num_parts.shape[0],
        "F": words.feature.shape[2] if words else 0,
        "MASKED": words is not None,
        "BR": chunk,
    }
    (da,) = launch(
        outer_kernel,
        inputs,
        [jax.ShapeDtypeStruct((room, k, r), jnp.float32)],
        grid=(math.ceil(k / tile.sizes["BK"]), room, r // chunk),
        tile=tile,
        target=target,
        constants=constants,
    )
    return da

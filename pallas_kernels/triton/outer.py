"""The outer kernel: the gradient `dA[g] = dropout(x)^T ds` of each slot.

Programs of up to three projections that read the same part of x run side by side, so
that it is read from device memory once. The rows of each slot are split into parts
(`pallas_kernels/parts.py`), which programs sum independently of each other, and XLA
adds up the parts in a fixed order. The mask is recomputed from its words, or
read from its bits.
"""

import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float

from jaxlora.pallas_kernels.dropout import MaskWords
from jaxlora.pallas_kernels.given_mask import GivenMask
from jaxlora.pallas_kernels.operands import Blocks
from jaxlora.pallas_kernels.parts import Parts, make_parts, sum_parts
from jaxlora.pallas_kernels.projection import KernelSettings
from jaxlora.pallas_kernels.triton.arguments import (
    GIVEN,
    HASHED,
    MAX_PROJECTIONS,
    choose,
    has_bit,
    is_kept,
    load_tokens,
    mask_arguments,
    mask_constants,
    padded,
    settings_arguments,
)
from jaxlora.pallas_kernels.triton.launch import (
    CHUNK,
    MAX_PARTS,
    Tile,
    launch,
    tile_for,
)
from jaxlora.pallas_kernels.triton.target import Target


@triton.jit
@typing.no_type_check
def outer_kernel(
    x, ds_0, ds_1, ds_2, order, part_slot, part_first, part_blocks, num_parts,
    row_0, row_1, row_2, chunks_0, chunks_1, chunks_2,
    threshold_0, threshold_1, threshold_2, place_0, place_1, place_2,
    token_0, token_1, token_2, feature_0, feature_1, feature_2, da_0, da_1, da_2,
    T: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, MASK: tl.constexpr, F: tl.constexpr,
    FG: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Computes one column tile and one chunk of ranks of one part of a slot's rows.

    Args:
        x: [T, K].
        ds_0: [T, R] of projection 0; and so on. Only the chunks are read that the row's
            slot has.
        order: Blocks of 64 rows sorted by slot, [T / 64].
        part_slot: Slot of each part.
        part_first: Index in `order` of each part's first block.
        part_blocks: Number of blocks of each part.
        num_parts: Number of parts, [1].
        row_0, chunks_0: See `settings_arguments`.
        threshold_0, place_0, token_0, feature_0: See `mask_arguments`.
        da_0: dropout(x)^T ds by part, [parts, K, R], float32.
        T, K, R, G, F, FG: Sizes.
        BR: Ranks of a chunk.
        P: Number of projections.
        MASK: Kind of the masks, see `HASHED`; 0: none.
        BK: Columns of a tile.
    """
    p, tile = tl.program_id(0) % P, tl.program_id(0) // P
    part, chunk = tl.program_id(1), tl.program_id(2)
    if part < tl.load(num_parts):
        slot = tl.load(part_slot + part)
        first, count = tl.load(part_first + part), tl.load(part_blocks + part)
        setting = tl.load(choose(p, row_0, row_1, row_2)) * G + slot
        num_chunks = tl.load(choose(p, chunks_0, chunks_1, chunks_2) + setting)
        count = tl.where(chunk < num_chunks, count, 0)
        rows, ranks = tl.arange(0, 64), chunk * BR + tl.arange(0, BR)
        columns = tile * BK + tl.arange(0, BK)
        inside = columns < K
        if MASK == GIVEN:
            bits = choose(p, feature_0, feature_1, feature_2)
            first_bits, second_bits = load_tokens(token_0, 0, rows, T)
        if MASK == HASHED:
            place = tl.load(choose(p, place_0, place_1, place_2))
            limit = tl.load(choose(p, threshold_0, threshold_1, threshold_2) + setting)
            token = choose(p, token_0, token_1, token_2)
            feature = choose(p, feature_0, feature_1, feature_2)
            feature += (place * FG + slot % FG).to(tl.int64) * F
            words = tl.load(feature + columns, mask=inside, other=0)
        ds = choose(p, ds_0, ds_1, ds_2)
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
            if MASK:
                if MASK == GIVEN:
                    kept = has_bit(first_bits, second_bits, bits, block, columns, F)
                else:
                    tokens = load_tokens(token, place, block * 64 + rows, T)
                    kept = is_kept(tokens[0], tokens[1], words, limit)
                x_tile = tl.where(kept, x_tile, 0.0)
            total = tl.dot(ds_tile, x_tile, total)
        da = choose(p, da_0, da_1, da_2) + part.to(tl.int64) * K * R
        da_at = da + columns[None, :] * R + ranks[:, None]
        tl.store(da_at, total, mask=inside[None, :])


def outer(
    x: Float[Array, "T K"],
    ds: Sequence[Float[Array, "T R"]],
    settings: Sequence[KernelSettings],
    masks: Sequence[MaskWords | GivenMask],
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
        masks: Words or bits of each projection's mask; empty without dropout.
        blocks: Slots of the rows.
        target: The device for which the kernel is compiled.
        tile: How it is compiled; None: the table's choice.
    """
    tile = tile or tile_for("outer", target, rank=ds[0].shape[1])
    parts = make_parts(blocks, MAX_PARTS)
    sums = []
    for first in range(0, len(ds), MAX_PROJECTIONS):
        i = slice(first, first + MAX_PROJECTIONS)
        shared = blocks, parts, target, tile
        sums += _launch_outer(x, ds[i], settings[i], masks[i], *shared)
    return [sum_parts(one, parts) for one in sums]


def _launch_outer(
    x, ds, settings, masks, blocks: Blocks, parts: Parts, target: Target, tile: Tile
) -> list[Float[Array, "parts K R"]]:
    """Runs the kernel for one to three projections."""
    (t, k), r, table, num = x.shape, ds[0].shape[1], parts.table, len(ds)
    chunk, room = min(r, CHUNK), table.slot.shape[0]
    out = jax.ShapeDtypeStruct((room, k, r), jnp.float32)
    unused = jax.ShapeDtypeStruct((8,), jnp.float32)
    das = launch(
        outer_kernel,
        [
            *(x, *padded(ds), blocks.order),
            *(table.slot, table.first_block, table.num_blocks, table.num_parts),
            *settings_arguments(settings, "num_chunks"),
            *mask_arguments(settings, masks, unused=blocks.slot),
        ],
        [out] * num + [unused] * (MAX_PROJECTIONS - num),
        grid=(num * math.ceil(k / tile.sizes["BK"]), room, r // chunk),
        tile=tile,
        target=target,
        constants={
            **{"T": t, "K": k, "R": r, "BR": chunk, "P": num},
            "G": parts.num_parts.shape[0],
            **mask_constants(masks),
        },
    )
    return das[:num]

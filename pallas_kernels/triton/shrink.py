"""The shrink kernel: `s = factor * dropout(x) A` for projections that share x.

Grid: up to three projections, tiles of BM rows, and chunks of at most 64 ranks. The
projections' programs of the same rows run side by side, so that x is read from device
memory once. BM divides 64, so the rows of a tile have one slot.
"""

import functools
import math
import typing
from collections.abc import Sequence

import jax
import triton
import triton.language as tl

from jaxlora.pallas_kernels.dropout import MaskWords
from jaxlora.pallas_kernels.given_mask import GivenMask
from jaxlora.pallas_kernels.operands import Blocks
from jaxlora.pallas_kernels.projection import RANK_STEP, KernelSettings
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
from jaxlora.pallas_kernels.triton.launch import Tile, launch, tile_for
from jaxlora.pallas_kernels.triton.target import Target


def shrink(
    x: jax.Array,
    a: Sequence[jax.Array],
    settings: Sequence[KernelSettings],
    masks: Sequence[MaskWords | GivenMask],
    blocks: Blocks,
    *,
    rank_first: bool,
    target: Target,
    tile: Tile | None = None,
) -> list[jax.Array]:
    """Computes `s = factor * dropout(x) A` of each projection, [T, R] in x's dtype.

    In each block of rows, only the ranks of the block's own adapter are defined.

    Args:
        x: [T, K].
        a: A of each projection, [G, K, R] in x's dtype.
        settings: Settings of each projection.
        masks: Words or bits of each projection's mask; empty without dropout.
        blocks: Slots of the rows.
        rank_first: Whether every A is stored [G, R, K].
        target: What the kernel is compiled for.
        tile: How it is compiled; None: the table's choice.
    """
    if len(a) > MAX_PROJECTIONS:
        run = functools.partial(
            shrink, blocks=blocks, rank_first=rank_first, target=target, tile=tile
        )
        parts = slice(0, MAX_PROJECTIONS), slice(MAX_PROJECTIONS, None)
        first, rest = (run(x, a[i], settings[i], masks[i]) for i in parts)
        return first + rest
    (t, k), r = x.shape, a[0].shape[1 if rank_first else 2]
    tile = tile or tile_for("shrink", target, rank=r)
    out = jax.ShapeDtypeStruct((t, r), x.dtype)
    unused = jax.ShapeDtypeStruct((8,), x.dtype)
    results = launch(
        shrink_kernel,
        [
            x,
            *padded(a),
            blocks.slot,
            *settings_arguments(settings, "factor", "num_chunks"),
            *mask_arguments(settings, masks, unused=blocks.slot),
        ],
        [out] * len(a) + [unused] * (MAX_PROJECTIONS - len(a)),
        grid=(len(a), t // tile.sizes["BM"], math.ceil(r / RANK_STEP)),
        tile=tile,
        target=target,
        constants={
            "T": t,
            "K": k,
            "R": r,
            "BR": min(r, RANK_STEP),
            "G": a[0].shape[0],
            "RANK_FIRST": rank_first,
            **mask_constants(masks),
        },
    )
    return results[: len(a)]


@triton.jit
@typing.no_type_check
def shrink_kernel(
    x, a_0, a_1, a_2, slot_of,
    row_0, row_1, row_2, factor_0, factor_1, factor_2, chunks_0, chunks_1, chunks_2,
    threshold_0, threshold_1, threshold_2, place_0, place_1, place_2,
    token_0, token_1, token_2, feature_0, feature_1, feature_2, s_0, s_1, s_2,
    T: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    G: tl.constexpr, RANK_FIRST: tl.constexpr, MASK: tl.constexpr, F: tl.constexpr,
    FG: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Computes BM rows and BR ranks of s of one projection.

    Args:
        x: [T, K].
        a_0: [G, K, R], or [G, R, K] if `RANK_FIRST`, of projection 0; and so on.
        slot_of: Slot of each block of 64 rows, [T / 64].
        row_0, factor_0, chunks_0: See `settings_arguments`.
        threshold_0, place_0, token_0, feature_0: See `mask_arguments`.
        s_0: The result, [T, R].
        T, K, R, G, F, FG: Sizes.
        BR: Ranks of a chunk.
        RANK_FIRST: Whether A is stored rank first.
        MASK: Kind of the masks, see `HASHED`; 0: none.
        BM, BK: Rows of a tile, and features of a step.
    """
    p, tile, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slot_of + tile * BM // 64)
    g = tl.maximum(slot, 0)
    setting = tl.load(choose(p, row_0, row_1, row_2)) * G + g
    num_chunks = tl.load(choose(p, chunks_0, chunks_1, chunks_2) + setting)
    if (slot >= 0) & (chunk < num_chunks):
        rows, ks = tl.arange(0, BM), tl.arange(0, BK)
        ranks = chunk * BR + tl.arange(0, BR)
        if MASK == GIVEN:
            bits = choose(p, feature_0, feature_1, feature_2)
            first, second = load_tokens(token_0, 0, (tile * BM + rows) % 64, T)
        if MASK == HASHED:
            place = tl.load(choose(p, place_0, place_1, place_2))
            token = choose(p, token_0, token_1, token_2)
            multipliers, offsets = load_tokens(token, place, tile * BM + rows, T)
            limit = tl.load(choose(p, threshold_0, threshold_1, threshold_2) + setting)
            feature = choose(p, feature_0, feature_1, feature_2)
            feature += (place * FG + g % FG).to(tl.int64) * F
        x += tile.to(tl.int64) * (BM * K)
        x_offsets = rows[:, None] * K + ks[None, :]
        a = choose(p, a_0, a_1, a_2) + g.to(tl.int64) * (K * R)
        if RANK_FIRST:
            a_offsets = ks[:, None] + ranks[None, :] * K
        else:
            a_offsets = ks[:, None] * R + ranks[None, :]
        acc = tl.zeros((BM, BR), tl.float32)
        for k in range(0, K, BK):
            if K % BK == 0:
                x_tile, a_tile = tl.load(x + x_offsets), tl.load(a + a_offsets)
            else:
                inside = ks < K - k
                x_tile = tl.load(x + x_offsets, mask=inside[None, :], other=0.0)
                a_tile = tl.load(a + a_offsets, mask=inside[:, None], other=0.0)
            if MASK:
                if MASK == GIVEN:
                    block = tile * BM // 64
                    kept = has_bit(first, second, bits, block, k + ks, F)
                else:
                    words = tl.load(feature + k + ks, mask=k + ks < F, other=0)
                    kept = is_kept(multipliers, offsets, words, limit)
                x_tile = tl.where(kept, x_tile, 0.0)
            acc = tl.dot(x_tile, a_tile, acc)
            x += BK
            a += BK if RANK_FIRST else BK * R
        acc *= tl.load(choose(p, factor_0, factor_1, factor_2) + setting)
        s = choose(p, s_0, s_1, s_2) + tile.to(tl.int64) * (BM * R)
        tl.store(s + rows[:, None] * R + ranks[None, :], acc.to(s.dtype.element_ty))

"""The expand kernel: `y = x W + bias + mask * (s B)`, summed over projections.

Grid: tiles of BM x BN of y, in bands. The masked term comes first, as the start of the
accumulator: so it needs neither an accumulator of its own beside the long product nor
mask words that stay in registers meanwhile. See docs/kernels.md.
"""

import math
import typing
from collections.abc import Sequence

import jax
import triton
import triton.language as tl

from jaxlora.pallas_kernels.operands import Blocks, Term
from jaxlora.pallas_kernels.projection import RANK_STEP
from jaxlora.pallas_kernels.triton.arguments import (
    GIVEN,
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


def expand(
    terms: Sequence[Term],
    layer: jax.Array,
    blocks: Blocks,
    *,
    bias: jax.Array | None = None,
    transposed: bool,
    rank_last: bool,
    target: Target,
    tile: Tile | None = None,
) -> jax.Array:
    """Computes the sum of `x W + mask * (s B)`, + bias; returns it, [T, N].

    Args:
        terms: One to three terms; all have a mask of the same kind or none has.
        layer: Index of the layer in every W, [1]; or of each two blocks of rows.
        blocks: Slots of the rows.
        bias: [N]; [L, N] if the layer goes by blocks.
        transposed: Whether every W is stored [L, N, K].
        rank_last: Whether every B is stored [G, N, R].
        target: What the kernel is compiled for.
        tile: How it is compiled; None: the table's choice.
    """
    first = terms[0]
    t, n = first.x.shape[0], first.w.shape[1 if transposed else 2]
    r = first.s.shape[1]
    features = [term.x.shape[1] for term in terms]
    settings = [term.settings for term in terms]
    masks = [term.mask for term in terms if term.mask is not None]
    kernel = "expand" if len(terms) == 1 else f"expand_{len(terms)}"
    shape = t, features[0], n
    tile = tile or tile_for(kernel, target, rank=r, shape=shape)
    tiles = math.ceil(t / tile.sizes["BM"]) * math.ceil(n / tile.sizes["BN"])
    inputs = [
        *padded([term.x for term in terms]),
        *padded([term.w for term in terms]),
        *padded([term.s for term in terms]),
        *padded([term.b for term in terms]),
        layer,
        blocks.slot,
        first.x if bias is None else bias,
        *settings_arguments(settings, "num_chunks"),
        *mask_arguments(settings, masks, unused=blocks.slot),
    ]
    (y,) = launch(
        expand_kernel,
        inputs,
        [jax.ShapeDtypeStruct((t, n), first.x.dtype)],
        grid=(tiles,),
        tile=tile,
        target=target,
        constants={
            "T": t,
            "N": n,
            "R": r,
            "BR": min(r, RANK_STEP),
            "G": first.b.shape[0],
            "P": len(terms),
            **dict(zip(("K_0", "K_1", "K_2"), padded(features), strict=True)),
            "TRANSPOSED": transposed,
            "RANK_LAST": rank_last,
            "BIASED": bias is not None,
            "BY_TILE": blocks.num_tiles is not None,
            **mask_constants(masks),
        },
    )
    return y


@triton.jit
@typing.no_type_check
def expand_kernel(
    x_0, x_1, x_2, w_0, w_1, w_2, s_0, s_1, s_2, b_0, b_1, b_2, layer, slot_of, bias,
    row_0, row_1, row_2, chunks_0, chunks_1, chunks_2,
    threshold_0, threshold_1, threshold_2, place_0, place_1, place_2,
    token_0, token_1, token_2, feature_0, feature_1, feature_2, y,
    T: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr,
    K_0: tl.constexpr, K_1: tl.constexpr, K_2: tl.constexpr,
    TRANSPOSED: tl.constexpr, RANK_LAST: tl.constexpr, BIASED: tl.constexpr,
    BY_TILE: tl.constexpr, MASK: tl.constexpr, F: tl.constexpr, FG: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Computes one tile of y.

    Args:
        x_0: [T, K_0] of projection 0; and so on.
        w_0: [L, K_0, N], or [L, N, K_0] if `TRANSPOSED`.
        s_0: [T, R].
        b_0: [G, R, N], or [G, N, R] if `RANK_LAST`.
        layer: Index in w, [1]; of each 128 rows if `BY_TILE`.
        slot_of: Slot of each block of 64 rows, [T / 64].
        bias: [N], or [L, N] if `BY_TILE`; read if `BIASED`.
        row_0, chunks_0: See `settings_arguments`.
        threshold_0, place_0, token_0, feature_0: See `mask_arguments`; features are
            those of y.
        y: The result, [T, N].
        T, N, R, G, F, FG, K_0: Sizes.
        BR: Ranks of a chunk.
        P: Number of projections.
        TRANSPOSED, RANK_LAST, BIASED, BY_TILE: As in `expand`.
        MASK: Kind of the masks, see `HASHED`; 0: none.
        BM, BN, BK: Sizes of a tile and features of a step.
        BAND: Tile rows that are visited together.
    """
    xs, ws, widths = (x_0, x_1, x_2), (w_0, w_1, w_2), (K_0, K_1, K_2)
    ss, bs, rows_of = (s_0, s_1, s_2), (b_0, b_1, b_2), (row_0, row_1, row_2)
    chunks, places = (chunks_0, chunks_1, chunks_2), (place_0, place_1, place_2)
    thresholds = (threshold_0, threshold_1, threshold_2)
    tokens, features = (token_0, token_1, token_2), (feature_0, feature_1, feature_2)
    m, n = tile_place(tl.program_id(0), (T + BM - 1) // BM, (N + BN - 1) // BN, BAND)
    rows, columns = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    # Half a tile's rows have one slot. Halves beyond T repeat the last rows.
    upper, lower = m * BM, tl.minimum(m * BM + BM // 2, T - BM // 2)
    slot, lower_slot = tl.load(slot_of + upper // 64), tl.load(slot_of + lower // 64)
    if tl.maximum(slot, lower_slot) >= 0:
        terms = ss, bs, rows_of, chunks, thresholds, places, tokens, features
        upper_half = _half_term(
            terms, (slot, upper), n, N, R, BR, G, P, T, RANK_LAST, MASK, F, FG, BM, BN
        )
        lower_half = _half_term(
            terms, (lower_slot, lower), n,
            N, R, BR, G, P, T, RANK_LAST, MASK, F, FG, BM, BN,
        )  # fmt: skip
        acc = tl.join(upper_half, lower_half).permute(2, 0, 1).reshape(BM, BN)
        if BY_TILE:
            layer += m * BM // 128
        index = tl.load(layer).to(tl.int64)
        for p in tl.static_range(P):
            w = ws[p] + index * (widths[p] * N)
            acc = add_product(
                acc, xs[p], w, m, n, T, N, widths[p], TRANSPOSED, BM, BN, BK
            )
        if BIASED:
            if BY_TILE:
                bias += index * N
            bias_row = tl.load(bias + columns, mask=columns < N, other=0.0)
            acc += bias_row[None, :].to(tl.float32)
        # Rows of padding may be in a tile with an adapter's.
        row_slots = tl.load(slot_of + rows // 64, mask=rows < T, other=-1)
        acc = tl.where((row_slots >= 0)[:, None], acc, 0.0)
    y_at = (
        y + (m * BM).to(tl.int64) * N + (rows - m * BM)[:, None] * N + columns[None, :]
    )
    out = acc.to(y.dtype.element_ty)
    if T % BM == 0 and N % BN == 0:
        tl.store(y_at, out)
    else:
        tl.store(y_at, out, mask=(rows < T)[:, None] & (columns < N)[None, :])


@triton.jit
@typing.no_type_check
def tile_place(index, tiles_m, tiles_n, BAND: tl.constexpr):
    """Returns the row and column of a tile: bands of rows, and down the rows first."""
    in_band = BAND * tiles_n
    first = index // in_band * BAND
    height = tl.minimum(tiles_m - first, BAND)
    return first + index % in_band % height, index % in_band // height


@triton.jit
@typing.no_type_check
def _half_term(
    terms, half, n, N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RANK_LAST: tl.constexpr,
    MASK: tl.constexpr, F: tl.constexpr, FG: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Returns the sum of `mask * (s B)` for half of a tile's rows, [BM / 2, BN].

    `half` is the slot of the rows and the index of the first.

    Triton lays out the product of a quarter of a tile as that of the whole tile. So the
    quarters are joined in registers, and each needs few of its own.
    """
    rows, columns = half[1] + tl.arange(0, BM // 2), n * BN + tl.arange(0, BN // 2)
    left = _quarter_term(
        terms, half, rows, columns, N, R, BR, G, P, T, RANK_LAST, MASK, F, FG, BM, BN
    )
    columns += BN // 2
    right = _quarter_term(
        terms, half, rows, columns, N, R, BR, G, P, T, RANK_LAST, MASK, F, FG, BM, BN
    )
    return tl.join(left, right).permute(0, 2, 1).reshape(BM // 2, BN)


@triton.jit
@typing.no_type_check
def _quarter_term(
    terms, half, rows, columns, N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, T: tl.constexpr, RANK_LAST: tl.constexpr,
    MASK: tl.constexpr, F: tl.constexpr, FG: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Returns the sum of `mask * (s B)` for a quarter of a tile, [BM / 2, BN / 2]."""
    ss, bs, rows_of, chunks, thresholds, places, tokens, features = terms
    slot, first = half
    total = tl.zeros((BM // 2, BN // 2), tl.float32)
    g = tl.maximum(slot, 0)
    for p in tl.static_range(P):
        setting = tl.load(rows_of[p]) * G + g
        num_chunks = tl.load(chunks[p] + setting)
        if (slot >= 0) & (num_chunks > 0):
            b = bs[p] + g.to(tl.int64) * (N * R)
            term = tl.zeros((BM // 2, BN // 2), tl.float32) if MASK else total
            # Stages would take shared memory from the long product. Also a single chunk
            # has a loop: Triton merges neighboring branches, and products in the same
            # block get another layout.
            for c in tl.range(0, num_chunks, num_stages=1):
                term = _chunk(term, ss[p], b, c, rows, columns, N, R, BR, RANK_LAST, BN)
            if MASK:
                if MASK == GIVEN:
                    bits = load_tokens(tokens[p], 0, rows % 64, T)
                    kept = has_bit(*bits, features[p], first // 64, columns, F)
                else:
                    place = tl.load(places[p])
                    multipliers, offsets = load_tokens(tokens[p], place, rows, T)
                    word = (place * FG + g % FG).to(tl.int64) * F
                    word_at = features[p] + word + columns
                    words = tl.load(word_at, mask=columns < F, other=0)
                    limit = tl.load(thresholds[p] + setting)
                    kept = is_kept(multipliers, offsets, words, limit)
                term = tl.where(kept, term, 0.0)
                term += total
            total = term
    return total


@triton.jit
@typing.no_type_check
def _chunk(
    term, s, b, chunk, rows, columns, N: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, RANK_LAST: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds the product of one chunk of ranks to the term."""
    ranks = chunk * BR + tl.arange(0, BR)
    s_tile = tl.load(s + rows[:, None] * R + ranks[None, :])
    if RANK_LAST:
        b_at = b + columns[None, :] * R + ranks[:, None]
    else:
        b_at = b + columns[None, :] + ranks[:, None] * N
    if N % BN == 0:
        b_tile = tl.load(b_at)
    else:
        b_tile = tl.load(b_at, mask=(columns < N)[None, :], other=0.0)
    return tl.dot(s_tile, b_tile, term)


@triton.jit
@typing.no_type_check
def add_product(
    acc, x, w, m, n, T: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Adds a tile of x W to acc."""
    rows, columns, ks = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    inside_rows, inside_columns = m * BM + rows < T, n * BN + columns < N
    # Only the base moves, so that the offsets need no 64-bit additions in the loop.
    x += (m * BM).to(tl.int64) * K
    x_offsets = rows[:, None] * K + ks[None, :]
    if TRANSPOSED:
        w += (n * BN).to(tl.int64) * K
        w_offsets = columns[None, :] * K + ks[:, None]
    else:
        w += n * BN
        w_offsets = columns[None, :] + ks[:, None] * N
    for k in range(0, K, BK):
        if K % BK == 0 and T % BM == 0:
            x_tile = tl.load(x + x_offsets)
        else:
            in_x = inside_rows[:, None] & (ks < K - k)[None, :]
            x_tile = tl.load(x + x_offsets, mask=in_x, other=0.0)
        if K % BK == 0 and N % BN == 0:
            w_tile = tl.load(w + w_offsets)
        else:
            in_w = inside_columns[None, :] & (ks < K - k)[:, None]
            w_tile = tl.load(w + w_offsets, mask=in_w, other=0.0)
        acc = tl.dot(x_tile, w_tile, acc)
        x += BK
        w += BK if TRANSPOSED else BK * N
    return acc

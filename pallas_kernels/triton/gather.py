"""The gather kernel: copies tokens to rows of experts, and computes s of the rows.

A linear would read the rows once more for `s = factor * rows A`. Grid: an entry of
`SharedBlocks`, or a block of 64 rows, in parts of BM rows. The rows of a program have
one slot, and it has steps of BK features. Blocks of padding are left out, and rows of
padding behind others of a block of 64 become zero.
"""

import math
import typing
from collections.abc import Sequence

import jax
import triton
import triton.language as tl

from jaxlora.pallas_kernels.dropout import TILE_TOKENS
from jaxlora.pallas_kernels.expert_rows import RowPlan
from jaxlora.pallas_kernels.operands import finite, make_operands, marked
from jaxlora.pallas_kernels.projection import Projection
from jaxlora.pallas_kernels.triton.arguments import settings_arguments
from jaxlora.pallas_kernels.triton.launch import Tile, launch
from jaxlora.pallas_kernels.triton.target import MOST_GATHERED, Target

TILE = Tile(sizes={"BM": 64, "BK": 64}, num_warps=4, num_stages=4)


def gather(
    x: jax.Array,
    projections: Sequence[Projection],
    plan: RowPlan,
    *,
    is_gradient: bool,
    target: Target,
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the rows of `gather_rows`, and s of linears; see `Backend.gather`."""
    given, k = make_operands(x, projections, plan), x.shape[1]
    tables, settings, shared = given.a, given.settings, given.blocks.shared
    entries = [given.blocks.slot] * 3
    if is_gradient:
        b = given.b if shared is None else map(finite, given.b)
        tables = [one.transpose(0, 2, 1) for one in b]
    if shared is not None:
        entries = [shared.slot, shared.block, shared.rows]
        settings = marked(settings, projections)
    num_slots, _, r = tables[0].shape
    num_unused = MOST_GATHERED - len(tables)
    rows, *s = launch(
        gather_kernel,
        [
            x,
            plan.copy,
            *entries,
            plan.slot,
            tables[0],
            tables[-1],
            *settings_arguments(settings, "factor"),
        ],
        [
            jax.ShapeDtypeStruct((plan.num_rows, k), x.dtype),
            *[jax.ShapeDtypeStruct((plan.num_rows, r), x.dtype)] * len(tables),
            *[jax.ShapeDtypeStruct((8,), x.dtype)] * num_unused,
        ],
        grid=(entries[0].shape[0] * (TILE_TOKENS // TILE.sizes["BM"]),),
        tile=TILE,
        target=target,
        constants={
            "K": k,
            "R": r,
            "G": num_slots,
            "P": len(tables),
            "CHOSEN": plan.row.shape[1],
            "COPIES": math.prod(plan.row.shape),
            "SHARED": shared is not None,
        },
    )
    return rows, s[: len(tables)]


@triton.jit
@typing.no_type_check
def gather_kernel(
    x, copy, slot_of, block_of, rows_of, small, a_0, a_1,
    row_0, row_1, _row, factor_0, factor_1, _factor, out, s_0, s_1,
    K: tl.constexpr, R: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    CHOSEN: tl.constexpr, COPIES: tl.constexpr, SHARED: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Copies BM rows of an entry, and computes their s.

    Args:
        x: [T, K].
        copy: Copy of each row, [S]; see `RowPlan`.
        slot_of, block_of, rows_of: Entries of `SharedBlocks`; the slot of each block if
            blocks are not shared.
        small: Slot of each block of 16 rows, if blocks are shared.
        a_0, a_1: [G, K, R] of both linears, or twice of one.
        row_0, row_1, factor_0, factor_1: See `settings_arguments`.
        out: The rows, [S, K].
        s_0, s_1: [S, R].
        K, R, G: Sizes.
        P: Number of linears.
        CHOSEN: Copies of a token.
        COPIES: Copies of all tokens.
        SHARED: Whether blocks are shared.
        BM, BK: Rows of a program, and features of a step.
    """
    entry, part = tl.program_id(0) // (64 // BM), tl.program_id(0) % (64 // BM)
    slot, block, first, after = tl.load(slot_of + entry), entry, 0, 64
    if SHARED:
        block, rows = tl.load(block_of + entry), tl.load(rows_of + entry)
        first, after = rows >> 8, rows & 255
        following = tl.load(small + block * 4 + after // 16, mask=after < 64, other=0)
        after = tl.where(following < 0, 64, after)
    if (slot >= 0) & (part * BM < after) & (part * BM + BM > first):
        local = part * BM + tl.arange(0, BM)
        is_own, row = (local >= first) & (local < after), block * 64 + local
        copies = tl.load(copy + row, mask=is_own, other=COPIES)
        token, row = (copies // CHOSEN).to(tl.int64), row.to(tl.int64)
        ks, ranks = tl.arange(0, BK), tl.arange(0, R)
        x_at = x + token[:, None] * K + ks[None, :]
        out_at = out + row[:, None] * K + ks[None, :]
        table = slot.to(tl.int64) * (K * R) + ks[:, None] * R + ranks[None, :]
        acc_0 = tl.zeros((BM, R), tl.float32)
        acc_1 = acc_0
        for k in range(0, K, BK):
            inside = ks < K - k
            from_x, to_rows = (copies < COPIES)[:, None], is_own[:, None]
            if K % BK != 0:
                from_x, to_rows = from_x & inside[None, :], to_rows & inside[None, :]
            tile = tl.load(x_at + k, mask=from_x, other=0.0)
            tl.store(out_at + k, tile, mask=to_rows)
            at = table + k * R
            acc_0 = tl.dot(tile, load_table(a_0 + at, inside, K, BK), acc_0)
            if P > 1:
                acc_1 = tl.dot(tile, load_table(a_1 + at, inside, K, BK), acc_1)
        at = row[:, None] * R + ranks[None, :]
        factor = tl.load(factor_0 + tl.load(row_0) * G + slot)
        tl.store(s_0 + at, (acc_0 * factor).to(s_0.dtype.element_ty), is_own[:, None])
        if P > 1:
            factor = tl.load(factor_1 + tl.load(row_1) * G + slot)
            rounded = (acc_1 * factor).to(s_1.dtype.element_ty)
            tl.store(s_1 + at, rounded, is_own[:, None])


@triton.jit
@typing.no_type_check
def load_table(a_at, inside, K: tl.constexpr, BK: tl.constexpr):
    """Loads the rows of A of a step's features, of which the last may have fewer."""
    if K % BK == 0:
        return tl.load(a_at)
    return tl.load(a_at, mask=inside[:, None], other=0.0)

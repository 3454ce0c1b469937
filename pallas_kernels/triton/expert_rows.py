"""Kernels that make rows of experts, with s or ds of the linears that take them.

`gather` copies tokens to their rows, `gate` computes SwiGLU, and `gate_gradient` its
gradient. A linear would read such rows once more for s = factor * rows A.

Grid: an entry of `SharedBlocks`, or a block of 64 rows, in parts of BM rows. The rows
of a program have one slot, and it has steps of BK features. Blocks of padding are left
out, and rows of padding behind others of a block of 64 become zero.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxlora.pallas_kernels.dropout import TILE_TOKENS
from jaxlora.pallas_kernels.expert_rows import RowPlan
from jaxlora.pallas_kernels.operands import Blocks, make_operands, marked
from jaxlora.pallas_kernels.projection import KernelSettings, Projection
from jaxlora.pallas_kernels.triton.arguments import settings_arguments
from jaxlora.pallas_kernels.triton.launch import Tile, launch
from jaxlora.pallas_kernels.triton.target import MOST_SIDE_PRODUCTS, Target

TILES = {
    "gather": Tile(sizes={"BM": 64, "BK": 64}, num_warps=4, num_stages=4),
    "gate": Tile(sizes={"BM": 64, "BK": 64}, num_warps=4, num_stages=3),
    "gate_gradient": Tile(sizes={"BM": 64, "BK": 64}, num_warps=4, num_stages=2),
}


def gather(
    x: jax.Array,
    projections: Sequence[Projection],
    plan: RowPlan,
    *,
    is_gradient: bool,
    target: Target,
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the rows of `gather_rows`, and s of one or two linears; see `Backend`."""
    side = _side(x, projections, plan, is_gradient=is_gradient)
    sizes = {"CHOSEN": plan.row.shape[1], "COPIES": math.prod(plan.row.shape)}
    (rows,), s, _ = _run(gather_kernel, [x, plan.copy], 1, side, plan, target, **sizes)
    return rows, s


def gate(
    y: Sequence[jax.Array], projection: Projection, plan: RowPlan, *, target: Target
) -> tuple[jax.Array, jax.Array]:
    """Returns SwiGLU of y, and s of the linear that takes it; see `Backend`."""
    side = _side(y[0], [projection], plan, is_gradient=False)
    (h,), (s,), _ = _run(gate_kernel, list(y), 1, side, plan, target)
    return h, s


def gate_gradient(
    y: Sequence[jax.Array],
    dh: jax.Array,
    weights: jax.Array,
    projections: Sequence[Projection],
    plan: RowPlan,
    *,
    target: Target,
) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
    """Returns the gradients of y, their ds, and those of weights; see `Backend`."""
    side = _side(dh, projections, plan, is_gradient=True)
    inputs = [*y, dh, weights]
    dy, ds, (dots,) = _run(gate_gradient_kernel, inputs, 2, side, plan, target)
    return dy, ds, dots


@dataclasses.dataclass(frozen=True)
class _Side:
    """Side products.

    Attributes:
        tables: A of each linear, or B transposed, [G, K, R], with R of 16, 32 or 64.
        settings: Settings of each linear.
        blocks: Slots of the rows.
    """

    tables: list[jax.Array]
    settings: list[KernelSettings]
    blocks: Blocks


def _side(x, projections, plan: RowPlan, *, is_gradient: bool) -> _Side:
    given = make_operands(x, projections, plan)
    if is_gradient:
        tables = [b.transpose(0, 2, 1) for b in given.b]
        return _Side(tables, given.settings, given.blocks)
    if given.blocks.shared is None:
        return _Side(given.a, given.settings, given.blocks)
    return _Side(given.a, marked(given.settings, projections), given.blocks)


def _run(kernel, inputs, num_results: int, side: _Side, plan, target, **sizes: int):
    """Runs a kernel; returns its rows, s of each linear, and other results."""
    name, tables = kernel.__name__.removesuffix("_kernel"), side.tables
    (_, k, r), shared, tile = tables[0].shape, side.blocks.shared, TILES[name]
    entries = [side.blocks.slot] * 3
    if shared is not None:
        entries = [shared.slot, shared.block, shared.rows]
    rows = jax.ShapeDtypeStruct((plan.num_rows, k), inputs[0].dtype)
    s = jax.ShapeDtypeStruct((plan.num_rows, r), inputs[0].dtype)
    num_unused = MOST_SIDE_PRODUCTS - len(tables)
    unused = [jax.ShapeDtypeStruct((8,), inputs[0].dtype)] * num_unused
    sums = [jax.ShapeDtypeStruct((plan.num_rows,), jnp.float32)]
    results = launch(
        kernel,
        [
            *inputs,
            *entries,
            plan.slot,
            tables[0],
            tables[-1],
            *settings_arguments(side.settings, "factor"),
        ],
        [
            *[rows] * num_results,
            *[s] * len(tables),
            *unused,
            *(sums if kernel is gate_gradient_kernel else []),
        ],
        grid=(entries[0].shape[0] * (TILE_TOKENS // tile.sizes["BM"]),),
        tile=tile,
        target=target,
        constants={
            "K": k,
            "R": r,
            "G": tables[0].shape[0],
            "P": len(tables),
            "SHARED": shared is not None,
            **sizes,
        },
    )
    after = num_results + len(tables)
    return (
        results[:num_results],
        results[num_results:after],
        results[after + num_unused :],
    )


# ---- kernels -------------------------------------------------------------------------
#
# Their parameters, beside arrays of rows:
#     slot_of, block_of, rows_of: Entries of `SharedBlocks`; or the slot of each block.
#     small: Slot of each block of 16 rows, if blocks are shared.
#     a_0, a_1: [G, K, R] of both linears.
#     row_0, row_1, factor_0, factor_1: See `settings_arguments`.
#     s_0, s_1: s of both linears, [S, R].
#     K, R, G: Sizes.
#     P: Number of linears.
#     SHARED: Whether blocks are shared.
#     BM, BK: Rows of a program, and features of a step.


@triton.jit
@typing.no_type_check
def gather_kernel(
    x, copy, slot_of, block_of, rows_of, small, a_0, a_1,
    row_0, row_1, _row, factor_0, factor_1, _factor, out, s_0, s_1,
    K: tl.constexpr, R: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    SHARED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    CHOSEN: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Copies tokens, [T, K], of the copies of rows, [S]."""
    slot, row, is_own = own_rows(slot_of, block_of, rows_of, small, SHARED, BM)
    if slot >= 0:
        copies = tl.load(copy + row, mask=is_own, other=COPIES)
        ks, ranks = tl.arange(0, BK), tl.arange(0, R)
        x_at = x + (copies // CHOSEN).to(tl.int64)[:, None] * K + ks[None, :]
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
        store_side(s_0, acc_0, row_0, factor_0, slot, row, is_own, R, G)
        if P > 1:
            store_side(s_1, acc_1, row_1, factor_1, slot, row, is_own, R, G)


@triton.jit
@typing.no_type_check
def gate_kernel(
    gate, up, slot_of, block_of, rows_of, small, a_0, _a,
    row_0, _row_1, _row_2, factor_0, _factor_1, _factor_2, h, s_0, _s,
    K: tl.constexpr, R: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    SHARED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Computes h of gate and up, all [S, K]."""
    slot, row, is_own = own_rows(slot_of, block_of, rows_of, small, SHARED, BM)
    if slot >= 0:
        ks, ranks = tl.arange(0, BK), tl.arange(0, R)
        rows_at = row[:, None] * K + ks[None, :]
        table = slot.to(tl.int64) * (K * R) + ks[:, None] * R + ranks[None, :]
        acc = tl.zeros((BM, R), tl.float32)
        for k in range(0, K, BK):
            inside = ks < K - k
            mask = is_own[:, None]
            if K % BK != 0:
                mask = mask & inside[None, :]
            g = tl.load(gate + rows_at + k, mask=mask, other=0.0).to(tl.float32)
            u = tl.load(up + rows_at + k, mask=mask, other=0.0).to(tl.float32)
            tile = (g * tl.sigmoid(g) * u).to(h.dtype.element_ty)
            tl.store(h + rows_at + k, tile, mask=mask)
            acc = tl.dot(tile, load_table(a_0 + table + k * R, inside, K, BK), acc)
        store_side(s_0, acc, row_0, factor_0, slot, row, is_own, R, G)


@triton.jit
@typing.no_type_check
def gate_gradient_kernel(
    gate, up, dh, weights, slot_of, block_of, rows_of, small, a_0, a_1,
    row_0, row_1, _row, factor_0, factor_1, _factor, dgate, dup, s_0, s_1, dots,
    K: tl.constexpr, R: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    SHARED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of gate and up, [S, K], and of weights, [S]."""
    slot, row, is_own = own_rows(slot_of, block_of, rows_of, small, SHARED, BM)
    if slot >= 0:
        ks, ranks = tl.arange(0, BK), tl.arange(0, R)
        rows_at = row[:, None] * K + ks[None, :]
        table = slot.to(tl.int64) * (K * R) + ks[:, None] * R + ranks[None, :]
        weight = tl.load(weights + row, mask=is_own, other=0.0)[:, None]
        acc_0 = tl.zeros((BM, R), tl.float32)
        acc_1, total = acc_0, tl.zeros((BM,), tl.float32)
        for k in range(0, K, BK):
            inside = ks < K - k
            mask = is_own[:, None]
            if K % BK != 0:
                mask = mask & inside[None, :]
            g = tl.load(gate + rows_at + k, mask=mask, other=0.0).to(tl.float32)
            u = tl.load(up + rows_at + k, mask=mask, other=0.0).to(tl.float32)
            d = tl.load(dh + rows_at + k, mask=mask, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(g)
            h = (g * sigmoid * u).to(dgate.dtype.element_ty).to(tl.float32)
            total += tl.sum(h * d, axis=1)
            d = (d * weight).to(dgate.dtype.element_ty).to(tl.float32)
            slope = sigmoid * (1 + g * (1 - sigmoid))
            first = (d * u * slope).to(dgate.dtype.element_ty)
            second = (d * g * sigmoid).to(dgate.dtype.element_ty)
            tl.store(dgate + rows_at + k, first, mask=mask)
            tl.store(dup + rows_at + k, second, mask=mask)
            at = table + k * R
            acc_0 = tl.dot(first, load_table(a_0 + at, inside, K, BK), acc_0)
            acc_1 = tl.dot(second, load_table(a_1 + at, inside, K, BK), acc_1)
        tl.store(dots + row, total, mask=is_own)
        store_side(s_0, acc_0, row_0, factor_0, slot, row, is_own, R, G)
        store_side(s_1, acc_1, row_1, factor_1, slot, row, is_own, R, G)


@triton.jit
@typing.no_type_check
def own_rows(slot_of, block_of, rows_of, small, SHARED: tl.constexpr, BM: tl.constexpr):
    """Returns the program's slot, -1 if it has no rows, its rows, and which it has."""
    entry, part = tl.program_id(0) // (64 // BM), tl.program_id(0) % (64 // BM)
    slot, block = tl.load(slot_of + entry), entry
    first, after = 0, 64
    if SHARED:
        block, rows = tl.load(block_of + entry), tl.load(rows_of + entry)
        first, after = rows >> 8, rows & 255
        following = tl.load(small + block * 4 + after // 16, mask=after < 64, other=0)
        after = tl.where(following < 0, 64, after)
        slot = tl.where((part * BM < after) & (part * BM + BM > first), slot, -1)
    local = part * BM + tl.arange(0, BM)
    is_own = (local >= first) & (local < after)
    return slot, (block * 64 + local).to(tl.int64), is_own


@triton.jit
@typing.no_type_check
def load_table(a_at, inside, K: tl.constexpr, BK: tl.constexpr):
    """Loads the rows of A of a step's features, of which the last may have fewer."""
    if K % BK == 0:
        return tl.load(a_at)
    return tl.load(a_at, mask=inside[:, None], other=0.0)


@triton.jit
@typing.no_type_check
def store_side(
    s, acc, setting, factors, slot, row, is_own, R: tl.constexpr, G: tl.constexpr
):
    """Stores a side product of rows."""
    factor = tl.load(factors + tl.load(setting) * G + slot)
    at = row[:, None] * R + tl.arange(0, R)[None, :]
    tl.store(s + at, (acc * factor).to(s.dtype.element_ty), mask=is_own[:, None])

"""The dual kernel: `ds = factor[g] * dy B[g]^T` and `dB[g] = s^T dy`, dy read once.

Both sums need all of dy, which is as large as y. A program reads a tile of columns for
some rows of one slot. ds is a sum over columns, so each tile writes its part of ds, and
XLA adds them up in a fixed order. See docs/portable_kernels.md for what that costs.

References:
    LoRAFusion, arXiv 2510.00206, section 5.1, which fuses the same two products.
"""

import math
import typing
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float

from jaxlora.pallas_kernels.operands import Blocks
from jaxlora.pallas_kernels.parts import make_parts, sum_parts
from jaxlora.pallas_kernels.projection import KernelSettings
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
def dual_kernel(
    dy,
    s,
    b,
    order,
    part_slot,
    part_first,
    part_blocks,
    num_parts,
    num_chunks,
    index,
    ds,
    db,
    T: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """Computes one column tile and one chunk of ranks of one part of a slot's rows.

    Args:
        dy: [T, N].
        s: [T, R]; only the chunks are read that the row's slot has.
        b: [G, R, N].
        order: Blocks of 64 rows sorted by slot, [NB].
        part_slot: Slot of each part.
        part_first: Index in `order` of each part's first block.
        part_blocks: Number of blocks of each part.
        num_parts: Number of parts, [1].
        num_chunks: Number of chunks of 64 ranks of each slot, [P, G].
        index: Row of `num_chunks`, [1].
        ds: dy B^T by column tile, [N / BN, T, R], float32.
        db: s^T dy by part, [parts, R, N], float32.
        T, N, R, G: Sizes.
        BN: Columns of a tile.
        BR: Ranks of a chunk, at most 64.
    """
    tile, part, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if part < tl.load(num_parts):
        slot = tl.load(part_slot + part)
        first, count = tl.load(part_first + part), tl.load(part_blocks + part)
        is_on = chunk < tl.load(num_chunks + tl.load(index) * G + slot)
        count = tl.where(is_on, count, 0)
        rows, ranks = tl.arange(0, 64), chunk * BR + tl.arange(0, BR)
        columns = tile * BN + tl.arange(0, BN)
        inside = columns < N
        b_at = b + slot.to(tl.int64) * R * N + ranks[None, :] * N + columns[:, None]
        b_tile = tl.load(b_at, mask=inside[:, None], other=0.0)
        total = tl.zeros((BR, BN), tl.float32)
        # Loads whose address was loaded in the same iteration would start a step later.
        following = tl.load(order + first)
        for i in range(count):
            row = following.to(tl.int64) * 64
            following = tl.load(order + first + i + 1, mask=i + 1 < count, other=0)
            s_tile = tl.load(s + row * R + rows[None, :] * R + ranks[:, None])
            dy_at = dy + row * N + rows[:, None] * N + columns[None, :]
            if N % BN == 0:
                dy_tile = tl.load(dy_at)
            else:
                dy_tile = tl.load(dy_at, mask=inside[None, :], other=0.0)
            total = tl.dot(s_tile, dy_tile, total)
            # This is always true here. In a region of its own, the second product gets
            # a layout of its own. With the first one's, each warp would compute all of
            # `total`.
            if is_on:
                ds_tile = tl.dot(dy_tile, b_tile)
                ds_row = (tile.to(tl.int64) * T + row) * R
                tl.store(ds + ds_row + rows[:, None] * R + ranks[None, :], ds_tile)
        db_at = db + part.to(tl.int64) * R * N + ranks[:, None] * N + columns[None, :]
        tl.store(db_at, total, mask=inside[None, :])


def dual(
    dy: Float[Array, "T N"],
    s: Float[Array, "T R"],
    b: Float[Array, "G R N"],
    settings: KernelSettings,
    blocks: Blocks,
    *,
    target: Target,
    tile: Tile | None = None,
) -> tuple[Float[Array, "T R"], Float[Array, "G R N"]]:
    """Returns ds in dy's dtype, and dB in float32.

    Rows of ds are zero for padding, and in chunks of ranks that the slot lacks.

    Args:
        dy: Gradient of y.
        s: The forward pass's `factor * dropout(x) A`.
        b: Expand matrices in dy's dtype; R is 16, 32 or a multiple of 64.
        settings: Settings of the projection.
        blocks: Slots of the rows.
        target: The device for which the kernel is compiled.
        tile: How it is compiled; None: the table's choice.
    """
    (t, n), (num_slots, r, _) = dy.shape, b.shape
    tile = tile or tile_for("dual", target, rank=r)
    parts, num_tiles = make_parts(blocks, MAX_PARTS), math.ceil(n / tile.sizes["BN"])
    table, chunk = parts.table, min(r, CHUNK)
    room = table.slot.shape[0]
    inputs: list[Any] = [
        *(dy, s, b, blocks.order),
        *(table.slot, table.first_block, table.num_blocks, table.num_parts),
        *(settings.num_chunks, settings.index),
    ]
    ds, db = launch(
        dual_kernel,
        inputs,
        [
            jax.ShapeDtypeStruct((num_tiles, t, r), jnp.float32),
            jax.ShapeDtypeStruct((room, r, n), jnp.float32),
        ],
        grid=(num_tiles, room, r // chunk),
        tile=tile,
        target=target,
        constants={"T": t, "N": n, "R": r, "G": num_slots, "BR": chunk},
    )
    return _sum_columns(ds, settings, blocks).astype(dy.dtype), sum_parts(db, parts)


def _sum_columns(
    parts: Float[Array, "tiles T R"], settings: Any, blocks: Blocks
) -> Float[Array, "T R"]:
    """Adds up the parts of ds and multiplies them by each slot's factor."""
    _, t, r = parts.shape
    slot, row = jnp.maximum(blocks.slot, 0), settings.index[0]
    num_chunks = jnp.where(blocks.slot < 0, 0, settings.num_chunks[row][slot])
    is_on = jnp.arange(r) // CHUNK < num_chunks[:, None]
    total = parts.sum(axis=0).reshape(slot.shape[0], -1, r)
    total *= settings.factor[row][slot][:, None, None]
    # Values that were never written may be anything, so they must be selected away.
    return jnp.where(is_on[:, None], total, 0).reshape(t, r)

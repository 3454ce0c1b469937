"""The outer kernel: gradients `dA = dropout(x)^T ds` and `dB = s^T dy` of each slot.

Both are `wide^T narrow`, summed over each slot's own rows; for dB, dy is wide and the
result is transposed.
Grid: one program per multiprocessor, and each takes items in turn. An item is 128
columns of wide, a chunk of 64 ranks, and one of `shares` shares of the parts into which
`parts.py` splits every slot's rows. Slots of experts are many and of few ranks, so
their items are of 256 columns and 16 or 32 ranks.
Pipeline: a ring of stages, each with a block of 64 rows: 64 x 128 of wide, 64 x 64 of
every narrow, and the words of those tokens' masks. One warpgroup loads; two compute 64
columns each. wide is read once for all projections, and there are no atomics.
See docs/hopper_kernels.md.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxlora.pallas_kernels.mosaic.mask import Mask, MaskTiles, apply_mask
from jaxlora.pallas_kernels.mosaic.ring import (
    COMPUTE_WGS,
    ROWS,
    STEP,
    Ref,
    Ring,
    RingShape,
    Smem,
    stages_that_fit,
    zeros_like,
)
from jaxlora.pallas_kernels.parts import BAD_BIT, ROW_BITS, PartTable

TILE_COLUMNS = COMPUTE_WGS * STEP
NARROW_COLUMNS = 2 * TILE_COLUMNS  # of a tile with few ranks
_NARROW_SUMS = 2  # sums of narrow tiles on their way to device memory


def outer_ring(
    num_projections: int,
    dtype: DTypeLike,
    mask: MaskTiles | None,
    *,
    width: int = STEP,
    columns: int = TILE_COLUMNS,
    transposed: bool = False,
    is_shared: bool = False,
) -> RingShape:
    """Returns the ring of `Outer` for operands in a dtype.

    With narrow tiles, or with one projection, the sum of a short part need not wait
    until the one before is stored. With more projections, the stages need the room.

    Args:
        num_projections: Number of projections that share wide.
        dtype: Dtype of wide and narrow.
        mask: Shapes of each mask's words; None: there are no masks.
        width: Ranks of a tile; with less than 64, the tiles of narrow are transposed.
        columns: Columns of a tile.
        transposed: Whether the result is.
        is_shared: Whether blocks are shared. Then each warpgroup has a narrow tile.
    """
    own, tile = columns // COMPUTE_WGS, (ROWS, STEP)
    sums, sum_tile = 2 if num_projections == 1 else 1, (ROWS, STEP)
    if width < STEP:
        sums, tile = _NARROW_SUMS, (width, ROWS)
        sum_tile = (width, own) if transposed else (own, width)
    sum_shape = sums, COMPUTE_WGS, *sum_tile
    copies = COMPUTE_WGS if is_shared else 1
    narrow = num_projections, copies, *tile
    words = (num_projections, *(mask.outer if mask else (2, ROWS)))
    stage_bytes = 2 * (columns * ROWS + math.prod(narrow))
    stages = stages_that_fit(
        stage_bytes + 4 * math.prod(words), 4 * math.prod(sum_shape)
    )
    return RingShape.of(
        num_stages=stages,
        num_copies=1 + num_projections * (2 if mask else copies),
        wide_smem=Smem((stages, ROWS, columns), dtype),
        narrow_smem=Smem((stages, *narrow), dtype),
        words_smem=Smem.flat(stages, *words) if mask else None,
        sum_smem=Smem(sum_shape, jnp.float32, is_tiled=width == STEP or not transposed),
    )


class _Part(NamedTuple):
    """An entry of a `PartTable`."""

    slot: Any
    row: Any
    first_block: Any
    num_blocks: Any
    rows: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    """Computes the sum of `wide^T narrow` over each part of a slot's rows.

    An item takes every `shares`-th part of all slots, and sums the blocks of each in
    order. Each of the P projections that share wide has its own narrow, mask and
    result.

    Attributes:
        ring: Barriers.
        wide_smem: Tiles of wide, [num_stages, 64, 128 or 256]; each warpgroup has one
            half of the columns.
        narrow_smem: Tiles of narrow, [num_stages, P, 1, 64, 64]; those of fewer ranks,
            [num_stages, P, 1, ranks, 64], and if blocks are shared, by warpgroup.
        words_smem: Mask words that come with a stage, or None.
        sum_smem: Sums on their way to device memory, by copy in flight and warpgroup,
            [copies, 2, columns, ranks], float32, or [copies, 2, ranks, columns] if
            `transposed`.
        wide_gmem: x or dy, [T, K].
        narrow_gmem: ds or s of each projection, [T, R]; [R, T] for narrow tiles.
        out_gmem: Partial sums for each projection, [rows, K, R], float32; [rows, R, K]
            if `transposed`. `sum_parts` adds them up.
        result_gmem: The sums of slots with one part, [G, K, R] or [G, R, K], float32;
            None: all sums are partial.
        order_gmem: Blocks of 64 rows sorted by slot, [NB]; None: the blocks of a part
            are consecutive, and it has its first block itself.
        parts: The parts of all slots' rows. If they have `rows`, blocks are shared, and
            other slots' rows must not reach the sum. Zeros in their places in narrow
            see to that, unless wide is not finite there.
        settings: `KernelSettings` of each projection, with only its own rows.
        masks: Dropout masks of wide for each projection; empty without dropout.
        shares: Number of items that share the parts of one tile.
        transposed: Whether the result is [parts, R, K].
    """

    ring: Ring
    wide_smem: Ref
    narrow_smem: Ref
    words_smem: Ref = None
    sum_smem: Ref
    wide_gmem: Ref
    narrow_gmem: tuple[Ref, ...]
    out_gmem: tuple[Ref, ...]
    result_gmem: tuple[Ref, ...] | None
    order_gmem: Ref = None
    parts: PartTable
    settings: tuple
    masks: tuple[Mask, ...]
    shares: int
    transposed: bool

    @property
    def _width(self) -> int:
        """Number of ranks of a tile."""
        return self.narrow_smem.shape[3]

    @property
    def _columns(self) -> int:
        """Number of columns of a tile."""
        return self.wide_smem.shape[2]

    @property
    def _own_columns(self) -> int:
        """Number of columns of a warpgroup."""
        return self._columns // COMPUTE_WGS

    @property
    def _is_narrow(self) -> bool:
        return self._width < STEP

    def _tile(self, item):
        """Returns the (first column, share, chunk of ranks) of an item."""
        num_tiles = pl.cdiv(self.wide_gmem.shape[1], self._columns)
        tile, item = lax.rem(item, num_tiles), lax.div(item, num_tiles)
        share, chunk = lax.rem(item, self.shares), lax.div(item, self.shares)
        return tile * self._columns, share, chunk

    def _part(self, index) -> _Part:
        """Reads an entry of the table of parts."""
        index = jnp.minimum(index, self.parts.slot.shape[0] - 1)
        arrays = (getattr(self.parts, name) for name in _Part._fields)
        return _Part(*(None if one is None else one[index] for one in arrays))

    def prefetch(self, item):
        """Reads (number of the item's parts, its first two parts)."""
        _, share, _ = self._tile(item)
        behind = jnp.maximum(self.parts.num_parts[0] - share, 0)
        num_parts = lax.div(behind + self.shares - 1, jnp.int32(self.shares))
        return num_parts, self._part(share), self._part(share + self.shares)

    def _each_part(self, item, prefetched, step, read, do):
        """Calls `do(i, part, read(part), step)` for each part; returns the next step.

        Each read of device memory takes as long as a short part, so a part's entry is
        read two parts ahead. To read what it points to before `do` was slower.
        """
        _, share, _ = self._tile(item)
        num_parts, first, second = prefetched

        def one(i, carry):
            step, part, known, following = carry
            later = self._part(share + (i + 2) * self.shares)
            return do(i, part, known, step), following, read(following), later

        start = step, first, read(first), second
        return lax.fori_loop(0, num_parts, one, start)[0]

    def _num_blocks(self, part, num_chunks, chunk):
        """Returns a part's number of blocks; 0 if its slot has no such chunk."""
        most = functools.reduce(jnp.maximum, num_chunks)
        return jnp.where(chunk < most, part.num_blocks, 0)

    def _num_chunks(self, part):
        return tuple(one.num_chunks[part.slot] for one in self.settings)

    def _block(self, index):
        if self.order_gmem is None:
            return index
        return self.order_gmem[jnp.minimum(index, self.order_gmem.shape[0] - 1)]

    def _clamp_column(self, column):
        """Clamps a column to the last 64, as a tile's second half may lie outside."""
        return jnp.minimum(column, self.wide_gmem.shape[1] - STEP)

    def load(self, index, item, prefetched, step):
        """Fills the stages of one item; returns the next step of the ring."""
        del index
        column, _, chunk = self._tile(item)
        ranks = pl.ds(chunk * self._width, self._width)

        def fill(stage, block):
            rows, full = pl.ds(block * ROWS, ROWS), self.ring.stage_full.at[stage]
            columns = pl.ds(column, self._columns)
            wide_gmem = self.wide_gmem.at[rows, columns]
            plgpu.copy_gmem_to_smem(wide_gmem, self.wide_smem.at[stage], full)
            for p, narrow in enumerate(self.narrow_gmem):
                at = (ranks, rows) if self._is_narrow else (rows, ranks)
                for copy in range(self.narrow_smem.shape[2]):
                    narrow_smem = self.narrow_smem.at[stage, p, copy]
                    plgpu.copy_gmem_to_smem(narrow.at[at], narrow_smem, full)
            for p, mask in enumerate(self.masks):
                words_smem = self.words_smem.at[stage, p]
                words = mask.outer_words(block, columns)
                plgpu.copy_gmem_to_smem(words, words_smem, full)

        def read(part):
            return self._num_chunks(part), self._block(part.first_block)

        def load_part(i, part, known, step):
            del i
            num_chunks, block = known

            def one(i, carry):
                step, block = carry
                following = self._block(part.first_block + i + 1)
                fill(self.ring.acquire(step), block)
                return step + 1, following

            num_blocks = self._num_blocks(part, num_chunks, chunk)
            return lax.fori_loop(0, num_blocks, one, (step, block))[0]

        return self._each_part(item, prefetched, step, read, load_part)

    def compute(self, item, prefetched, step, wg):
        """Computes one item; returns the next step of the ring."""
        column, _, chunk = self._tile(item)
        column = column + wg * self._own_columns
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def read(part):
            words = [self._words(p, part.slot, column) for p in range(len(self.masks))]
            return self._num_chunks(part), tuple(words)

        def compute_part(i, part, known, step):
            num_chunks, words = known
            num_blocks = self._num_blocks(part, num_chunks, chunk)

            def accumulate(*accs):
                def multiply(now):
                    stage = self.ring.wait(now)
                    if part.rows is not None:
                        self._clear_others(stage, part, now - step, wg)
                    for p, acc in enumerate(accs):
                        narrow_smem = self._narrow(stage, p, wg)
                        if self._is_narrow:
                            wide = self._wide(stage, wg, p, words)
                            plgpu.wgmma(acc, wide, narrow_smem.transpose((1, 0)))
                        elif self.transposed:
                            wide_smem = self._half(stage, wg)
                            plgpu.wgmma(acc, narrow_smem.transpose((1, 0)), wide_smem)
                        else:
                            wide = self._wide(stage, wg, p, words)
                            plgpu.wgmma(acc, wide, narrow_smem)

                num_in_flight = 0 if self.masks else len(accs)
                after = self.ring.each_step(num_blocks, step, multiply, num_in_flight)
                return [acc[...] for acc in accs], after

            shape = self._own_columns if self._is_narrow else STEP, self._width
            acc = plgpu.ACC(shape, jnp.float32)
            accs = [acc] * len(self.narrow_gmem)
            sums, step = pl.run_scoped(accumulate, *accs)
            for p, total in enumerate(sums):
                # narrow was not written if the slot does not adapt the projection.
                adapted = lax.broadcast(chunk < num_chunks[p], total.shape)
                total = jnp.where(adapted, total, zeros_like(total))
                buffer = lax.rem(i * len(sums) + p, jnp.int32(self.sum_smem.shape[0]))
                self._store(total, p, part, (chunk, column), (buffer, wg))
            return step

        return self._each_part(item, prefetched, step, read, compute_part)

    def _half(self, stage, wg) -> Ref:
        """Returns a warpgroup's columns of a stage's wide."""
        own = self._own_columns
        return self.wide_smem.at[stage, :, pl.ds(wg * own, own)]

    def _narrow(self, stage, p, wg) -> Ref:
        copy = wg if self.narrow_smem.shape[2] == COMPUTE_WGS else 0
        return self.narrow_smem.at[stage, p, copy]

    def _clear_others(self, stage, part, i, wg) -> None:
        """Puts zeros in the places of other slots' rows in a part's i-th block."""
        begin = ((part.rows >> ROW_BITS) & (ROWS - 1)) - i * ROWS
        end = (part.rows & (1 << ROW_BITS) - 1) - i * ROWS

        def clear(tile_smem, layout):
            tile = plgpu.load(tile_smem, layout=layout, optimized=False)
            row = plgpu.broadcasted_iota(jnp.int32, tile.shape, 0, layout=layout)
            inside = (row >= begin) & (row < end)
            tile_smem[...] = jnp.where(inside, tile, zeros_like(tile))

        @pl.when((begin > 0) | (end < ROWS))
        def _():
            for p in range(len(self.narrow_gmem)):
                narrow_smem = self._narrow(stage, p, wg).transpose((1, 0))
                clear(narrow_smem, plgpu.Layout.WGMMA_TRANSPOSED)
            wide_smem, is_bad = self._half(stage, wg), part.rows >> BAD_BIT
            pl.when(is_bad > 0)(lambda: clear(wide_smem, plgpu.Layout.WGMMA))
            plgpu.commit_smem()

    def _words(self, p, slot, column):
        """Reads (vectors of 64 features, threshold) of a projection's mask."""
        columns, mask = pl.ds(self._clamp_column(column), STEP), self.masks[p]
        features = mask.outer_features(slot, columns)
        return features, mask.threshold(self.settings[p], slot)

    def _wide(self, stage, wg, p, words):
        """Returns wide^T for projection p: in registers if masked, else in smem."""
        wide_smem = self._half(stage, wg).transpose((1, 0))
        if not self.masks:
            return wide_smem
        mask, (features, threshold) = self.masks[p], words[p]
        vectors = mask.outer_vectors(self.words_smem, stage, p, wg, features)
        wide = plgpu.load(wide_smem, layout=plgpu.Layout.WGMMA)
        return apply_mask(wide, mask, vectors, threshold, token_axis=1)

    def _store(self, total, p, part, at, buffer):
        """Starts the copy of a part's sum to its row, or to its slot's result."""
        chunk, column = at

        @pl.when(column < self.wide_gmem.shape[1])
        def _():
            plgpu.wait_smem_to_gmem(self.sum_smem.shape[0] - 1, wait_read_only=True)
            sum_smem = self.sum_smem.at[buffer]
            if self._is_narrow and self.transposed:
                turned = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
                sum_smem.transpose((1, 0))[...] = turned
            else:
                sum_smem[...] = total
            plgpu.commit_smem()
            k = pl.ds(column, total.shape[0] if self._is_narrow else STEP)
            r = pl.ds(chunk * self._width, self._width)

            def copy(out_gmem, index):
                where = (index, r, k) if self.transposed else (index, k, r)
                plgpu.copy_smem_to_gmem(sum_smem, out_gmem.at[where])

            if self.result_gmem is None:
                copy(self.out_gmem[p], part.row)
                return
            pl.when(part.row >= 0)(lambda: copy(self.out_gmem[p], part.row))
            pl.when(part.row < 0)(lambda: copy(self.result_gmem[p], part.slot))

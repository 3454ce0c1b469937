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
from jaxlora.pallas_kernels.parts import BAD_BIT, COLOR_BIT, ROW_BITS, PartTable

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
    """
    own, tile = columns // COMPUTE_WGS, (ROWS, STEP)
    sums, sum_tile = 2 if num_projections == 1 else 1, (ROWS, STEP)
    if width < STEP:
        sums, tile = _NARROW_SUMS, (width, ROWS)
        sum_tile = (width, own) if transposed else (own, width)
    sum_shape = sums, COMPUTE_WGS, *sum_tile
    narrow = num_projections, *tile
    words = (num_projections, *(mask.outer if mask else (2, ROWS)))
    stage_bytes = 2 * (columns * ROWS + math.prod(narrow))
    stages = stages_that_fit(
        stage_bytes + 4 * math.prod(words), 4 * math.prod(sum_shape)
    )
    return RingShape.of(
        num_stages=stages,
        num_copies=1 + num_projections * (2 if mask else 1),
        wide_smem=Smem((stages, ROWS, columns), dtype),
        narrow_smem=Smem((stages, *narrow), dtype),
        words_smem=Smem.flat(stages, *words) if mask else None,
        sum_smem=Smem(sum_shape, jnp.float32),
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

    An item takes every `shares`-th part of all slots, or of experts consecutive parts,
    and sums the blocks of each in order. Each of the P projections that share wide has
    its own narrow, mask and result.

    Attributes:
        ring: Barriers.
        wide_smem: Tiles of wide, [num_stages, 64, 128 or 256]; each warpgroup has one
            half of the columns.
        narrow_smem: Tiles of narrow, [num_stages, P, 64, 64]; those of fewer ranks,
            [num_stages, P, ranks, 64].
        words_smem: Mask words that come with a stage, or None.
        sum_smem: Sums on their way to device memory, by copy in flight and warpgroup,
            [copies, 2, columns, ranks], float32, or [copies, 2, ranks, columns] if
            `transposed`.
        wide_gmem: x or dy, [T, K].
        narrow_gmem: ds or s of each projection, [T, R]; [R, T] for narrow tiles, or if
            blocks are shared, [4 R, T], with zeros in the places of other slots' rows.
        out_gmem: Partial sums for each projection, [rows, K, R], float32; [rows, R, K]
            if `transposed`. `sum_parts` adds them up.
        result_gmem: The sums of slots with one part, [G, K, R] or [G, R, K], float32;
            None: all sums are partial.
        order_gmem: Blocks of 64 rows sorted by slot, [NB]; None: the blocks of a part
            are consecutive, and it has its first block itself.
        parts: The parts of all slots' rows. If they have `rows`, blocks are shared.
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
        return self.narrow_smem.shape[2]

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
        """Reads (number of the item's parts, the first one's index, the first two)."""
        _, share, _ = self._tile(item)
        all_parts = self.parts.num_parts[0]
        if self.order_gmem is None:
            begin, end = (
                lax.div(all_parts * one, jnp.int32(self.shares))
                for one in (share, share + 1)
            )
            return end - begin, begin, self._part(begin), self._part(begin + 1)
        behind = jnp.maximum(all_parts - share, 0)
        num_parts = lax.div(behind + self.shares - 1, jnp.int32(self.shares))
        return num_parts, share, self._part(share), self._part(share + self.shares)

    def _each_part(self, item, prefetched, step, read, do):
        """Calls `do(i, part, read(part), step)` for each part; returns the next step.

        Each read of device memory takes as long as a short part, so a part's entry is
        read two parts ahead. To read what it points to before `do` was slower. The
        many parts of experts are read in turn, from one line of the cache.
        """
        del item
        num_parts, index, first, second = prefetched
        stride = 1 if self.order_gmem is None else self.shares

        def one(i, carry):
            step, part, known, following = carry
            later = self._part(index + (i + 2) * stride)
            return do(i, part, known, step), following, read(following), later

        start = step, first, read(first), second
        return lax.fori_loop(0, num_parts, one, start)[0]

    def _num_blocks(self, part, num_chunks, chunk):
        """Returns a part's number of blocks; 0 if its slot has no such chunk."""
        most = functools.reduce(jnp.maximum, num_chunks)
        return jnp.where(chunk < most, part.num_blocks, 0)

    def _num_chunks(self, part):
        if part.rows is not None:  # their side products are zeros or written
            return (jnp.int32(1),) * len(self.settings)
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

        def fill(stage, block, part):
            first = chunk * self._width
            if part.rows is not None:
                first = (part.rows >> COLOR_BIT & 3) * self._width
            ranks = pl.ds(first, self._width)
            rows, full = pl.ds(block * ROWS, ROWS), self.ring.stage_full.at[stage]
            columns = pl.ds(column, self._columns)
            wide_gmem = self.wide_gmem.at[rows, columns]
            plgpu.copy_gmem_to_smem(wide_gmem, self.wide_smem.at[stage], full)
            for p, narrow in enumerate(self.narrow_gmem):
                at = (ranks, rows) if self._is_narrow else (rows, ranks)
                narrow_smem = self.narrow_smem.at[stage, p]
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
                fill(self.ring.acquire(step), block, part)
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
                    if self._is_narrow:
                        self._multiply_narrow(accs, stage, wg, words)
                        return
                    for p, acc in enumerate(accs):
                        narrow_smem = self.narrow_smem.at[stage, p]
                        if self.transposed:
                            wide_smem = self._own(stage, wg)
                            plgpu.wgmma(acc, narrow_smem.transpose((1, 0)), wide_smem)
                        else:
                            wide = self._wide(stage, wg, p, words)
                            plgpu.wgmma(acc, wide, narrow_smem)

                in_registers = self.masks or self._is_narrow
                num_in_flight = 0 if in_registers else len(accs)
                after = self.ring.each_step(num_blocks, step, multiply, num_in_flight)
                return [acc[...] for acc in accs], after

            acc = plgpu.ACC((STEP, self._width), jnp.float32)
            num_accs = len(self.narrow_gmem) * self._num_tiles
            sums, step = pl.run_scoped(accumulate, *[acc] * num_accs)
            for p in range(len(self.narrow_gmem)):
                own = sums[p * self._num_tiles : (p + 1) * self._num_tiles]
                # narrow was not written if the slot does not adapt the projection.
                adapted = lax.broadcast(chunk < num_chunks[p], own[0].shape)
                own = [jnp.where(adapted, one, zeros_like(one)) for one in own]
                number = i * len(self.narrow_gmem) + p
                buffer = lax.rem(number, jnp.int32(self.sum_smem.shape[0]))
                self._store(own, p, part, (chunk, column), (buffer, wg))
            return step

        return self._each_part(item, prefetched, step, read, compute_part)

    @property
    def _num_tiles(self) -> int:
        """Number of tiles of 64 columns that a warpgroup has."""
        return self._own_columns // STEP

    def _own(self, stage, wg, tile=0) -> Ref:
        """Returns 64 of a warpgroup's columns of a stage's wide."""
        start = wg * self._own_columns + tile * STEP
        return self.wide_smem.at[stage, :, pl.ds(start, STEP)]

    def _multiply_narrow(self, accs, stage, wg, words) -> None:
        """Starts the products of a stage, with wide in registers.

        In shared memory, each 64 x 16 of the left operand would take 32 cycles, however
        few columns the other has, and again for each projection.
        """
        for tile in range(self._num_tiles):
            wide = None
            for p in range(len(self.narrow_gmem)):
                if wide is None or self.masks:
                    wide = self._wide(stage, wg, p, words, tile)
                narrow = self.narrow_smem.at[stage, p].transpose((1, 0))
                plgpu.wgmma(accs[p * self._num_tiles + tile], wide, narrow)

    def _clear_others(self, stage, part, i, wg) -> None:
        """Puts zeros in the places of other slots' rows in a part's i-th block of wide.

        The zeros in narrow suffice where wide is finite.
        """
        begin = (part.rows >> ROW_BITS & ROWS - 1) - i * ROWS
        end = (part.rows & (1 << ROW_BITS) - 1) - i * ROWS
        is_bad = part.rows >> BAD_BIT

        @pl.when((is_bad > 0) & ((begin > 0) | (end < ROWS)))
        def _():
            layout = plgpu.Layout.WGMMA
            for tile in range(self._num_tiles):
                tile_smem = self._own(stage, wg, tile)
                wide = plgpu.load(tile_smem, layout=layout)
                row = plgpu.broadcasted_iota(jnp.int32, wide.shape, 0, layout=layout)
                inside = (row >= begin) & (row < end)
                tile_smem[...] = jnp.where(inside, wide, zeros_like(wide))
            plgpu.commit_smem()

    def _words(self, p, slot, column):
        """Reads (vectors of 64 features, threshold) of a projection's mask."""
        columns, mask = pl.ds(self._clamp_column(column), STEP), self.masks[p]
        features = mask.outer_features(slot, columns)
        return features, mask.threshold(self.settings[p], slot)

    def _wide(self, stage, wg, p, words, tile=0):
        """Returns wide^T for projection p: in registers if masked or narrow."""
        wide_smem = self._own(stage, wg, tile).transpose((1, 0))
        if not self.masks and not self._is_narrow:
            return wide_smem
        wide = plgpu.load(wide_smem, layout=plgpu.Layout.WGMMA)
        if not self.masks:
            return wide
        mask, (features, threshold) = self.masks[p], words[p]
        vectors = mask.outer_vectors(self.words_smem, stage, p, wg, features)
        return apply_mask(wide, mask, vectors, threshold, token_axis=1)

    def _store(self, totals, p, part, at, buffer):
        """Starts the copy of a part's sum to its row, or to its slot's result.

        There is a total for each tile of 64 columns.
        """
        chunk, column = at

        @pl.when(column < self.wide_gmem.shape[1])
        def _():
            plgpu.wait_smem_to_gmem(self.sum_smem.shape[0] - 1, wait_read_only=True)
            sum_smem = self.sum_smem.at[buffer]
            for tile, total in enumerate(totals):
                columns = pl.ds(tile * STEP, STEP)
                if self._is_narrow and self.transposed:
                    turned = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
                    sum_smem.at[:, columns].transpose((1, 0))[...] = turned
                else:
                    sum_smem.at[columns][...] = total
            plgpu.commit_smem()
            k = pl.ds(column, self._own_columns)
            r = pl.ds(chunk * self._width, self._width)

            def copy(out_gmem, index):
                where = (index, r, k) if self.transposed else (index, k, r)
                plgpu.copy_smem_to_gmem(sum_smem, out_gmem.at[where])

            if self.result_gmem is None:
                copy(self.out_gmem[p], part.row)
                return
            pl.when(part.row >= 0)(lambda: copy(self.out_gmem[p], part.row))
            pl.when(part.row < 0)(lambda: copy(self.result_gmem[p], part.slot))

"""Gradients of A and B: wide^T narrow, summed over each adapter's own rows."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dropout import token_words
from pallas_kernels.mosaic.mask import OF_COLUMN, OF_ROW, Mask, drop_each, load_line
from pallas_kernels.mosaic.ring import (
    COMPUTE,
    ROWS,
    STEP,
    Ring,
    most_chunks,
    zeros_like,
)

TILE_COLUMNS = COMPUTE * STEP


@dataclasses.dataclass(frozen=True)
class Outer:
    """Items are (128 columns of wide, split of the rows, chunk of 64 ranks).

    An item visits every slot and sums over the slot's own blocks in their order, each
    warpgroup for 64 of the columns. A split is a part of the slot's *own* blocks, so a
    sum's order does not depend on neighbours. Each of the P projections that share
    wide has its own narrow, mask and result.

    Attributes:
        ring: Shared memory.
        wide: x or dy, T K.
        narrow: ds or s, T R, of each projection.
        out: The gradients by split, S G K R (S G R K when `transposed`), float32.
        order: Blocks of 64 rows sorted by slot.
        starts: Where each slot's blocks start in `order`, G + 1.
        chunks: Chunks of 64 ranks that each slot fills, G, of each projection.
        masks: Dropout of wide, of each projection; empty: none.
        transposed: Whether out is S G R K.
    """

    ring: Ring
    wide: Any
    narrow: tuple
    out: tuple
    order: Any
    starts: Any
    chunks: tuple
    masks: tuple[Mask, ...]
    transposed: bool

    def _place(self, item):
        tiles = pl.cdiv(self.wide.shape[1], TILE_COLUMNS)
        splits = self.out[0].shape[0]
        tile, item = lax.rem(item, tiles), lax.div(item, tiles)
        return tile * TILE_COLUMNS, lax.rem(item, splits), lax.div(item, splits)

    def _bounds(self, slot, split, chunk):
        """(first of the slot's blocks in this split, how many)."""
        slot = jnp.minimum(slot, self.chunks[0].shape[0] - 1)
        splits = jnp.int32(self.out[0].shape[0])
        first = self.starts[slot]
        own = self.starts[slot + 1] - first
        begin = lax.div(own * split, splits)
        count = lax.div(own * (split + 1), splits) - begin
        live = chunk < most_chunks(self.chunks, slot)
        return first + begin, jnp.where(live, count, 0)

    def about(self, item):
        """The first slot's blocks."""
        _, split, chunk = self._place(item)
        return self._bounds(jnp.int32(0), split, chunk)

    def _each_slot(self, item, about, step, do):
        """`do(slot, begin, count, step)` for each slot; reads the next one's ahead."""
        _, split, chunk = self._place(item)

        def one(slot, carry):
            step, (begin, count) = carry
            following = self._bounds(slot + 1, split, chunk)
            return do(slot, begin, count, step), following

        num_slots = self.chunks[0].shape[0]
        return lax.fori_loop(0, num_slots, one, (step, about))[0]

    def _block(self, index):
        return self.order[jnp.minimum(index, self.order.shape[0] - 1)]

    def _inside(self, column):
        """A column to read: a tile's second half may lie outside."""
        return jnp.minimum(column, self.wide.shape[1] - STEP)

    def load(self, item, about, step):
        """Fills the stages of one item; returns the next step of the ring."""
        column, _, chunk = self._place(item)
        ranks = pl.ds(chunk * STEP, STEP)

        def fill(stage, block):
            rows, full = pl.ds(block * ROWS, ROWS), self.ring.both.at[stage]
            for w in range(COMPUTE):
                columns = pl.ds(self._inside(column + w * STEP), STEP)
                wide = self.wide.at[rows, columns]
                plgpu.copy_gmem_to_smem(wide, self.ring.x_part(stage, w), full)
            for p, narrow in enumerate(self.narrow):
                narrow, part = narrow.at[rows, ranks], self.ring.w.at[stage, p]
                plgpu.copy_gmem_to_smem(narrow, part, full)
            if self.masks:
                index = self.masks[0].token_index.at[rows]
                plgpu.copy_gmem_to_smem(index, self.ring.lines.at[stage, 0], full)

        def of_slot(slot, begin, count, step):
            del slot

            def one(i, carry):
                step, block = carry
                following = self._block(begin + i + 1)
                fill(self.ring.acquire(step), block)
                return step + 1, following

            return lax.fori_loop(0, count, one, (step, self._block(begin)))[0]

        return self._each_slot(item, about, step, of_slot)

    def compute(self, item, about, step, wg):
        """Computes one item; returns the next step of the ring."""
        column, split, chunk = self._place(item)
        column = column + wg * STEP

        def of_slot(slot, begin, count, step):
            del begin
            words = [self._words(mask, slot, column) for mask in self.masks]

            def accumulate(*accs):
                def multiply(i, step):
                    stage = self.ring.wait(step)
                    wides = self._copies(words, stage, wg, i)
                    for p, (acc, wide) in enumerate(zip(accs, wides, strict=True)):
                        narrow = self.ring.w.at[stage, p]
                        if self.transposed:
                            plgpu.wgmma(acc, narrow.transpose((1, 0)), wide)
                        else:
                            plgpu.wgmma(acc, wide.transpose((1, 0)), narrow)

                after = self.ring.each_step(count, step, multiply, products=len(accs))
                return [acc[...] for acc in accs], after

            accs = [plgpu.ACC((STEP, STEP), jnp.float32)] * len(self.narrow)
            totals, step = pl.run_scoped(accumulate, *accs)
            for total, out, chunks in zip(totals, self.out, self.chunks, strict=True):
                # Of a projection that the slot does not adapt, narrow was not written.
                mine = lax.broadcast(chunk < chunks[slot], total.shape)
                total = jnp.where(mine, total, zeros_like(total))
                self._store(total, out, (split, slot, chunk, column), wg)
            return step

        return self._each_slot(item, about, step, of_slot)

    def _words(self, mask, slot, column):
        """(word of the slot, words of the tile's features, threshold)."""
        word = mask.word.at[slot, pl.ds(self._inside(column), STEP)]
        return mask.key[slot, 0], load_line(word, OF_COLUMN), mask.threshold[slot]

    def _copies(self, words, stage, wg, i):
        """The stage's wide as each projection sees it."""
        wide = self.ring.x_part(stage, wg)
        if not words:
            return [wide] * len(self.narrow)
        index = load_line(self.ring.lines.at[stage, 0], OF_ROW)
        parts = [
            (token_words(key, index), features, threshold)
            for key, features, threshold in words
        ]
        return drop_each(wide, functools.partial(self.ring.spare_tile, i, wg), parts)

    def _store(self, total, out, at, wg):
        split, slot, chunk, column = at

        @pl.when(column < self.wide.shape[1])
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.ring.sum[wg] = total
            plgpu.commit_smem()
            k, r = pl.ds(column, STEP), pl.ds(chunk * STEP, STEP)
            where = (split, slot, r, k) if self.transposed else (split, slot, k, r)
            plgpu.copy_smem_to_gmem(self.ring.sum.at[wg], out.at[where])

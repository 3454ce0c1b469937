"""Gradients of A and B: wide^T narrow, summed over each adapter's own rows."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dropout import token_words
from pallas_kernels.mosaic.mask import OF_COLUMN, OF_ROW, Mask, drop_in_place, load_line
from pallas_kernels.mosaic.ring import COMPUTE, ROWS, STEP, Ring, zeros_like


@dataclasses.dataclass(frozen=True)
class Outer:
    """Items are (64 columns of wide, split of the rows, chunk of 64 ranks).

    An item visits every slot and sums over the slot's own blocks in their order, the
    warpgroups taking alternate blocks. A split is a part of the slot's *own* blocks, so
    a sum's order does not depend on neighbours.

    Attributes:
        ring: Shared memory.
        wide: x or dy, T K.
        narrow: ds or s, T R.
        out: The gradient by split, S G K R (S G R K when `transposed`), float32.
        order: Blocks of 64 rows sorted by slot.
        starts: Where each slot's blocks start in `order`, G + 1.
        chunks: Chunks of 64 ranks that each slot fills, G.
        mask: Dropout of wide, or None.
        transposed: Whether out is S G R K.
    """

    ring: Ring
    wide: Any
    narrow: Any
    out: Any
    order: Any
    starts: Any
    chunks: Any
    mask: Mask | None
    transposed: bool

    def _place(self, item):
        tiles, splits = self.wide.shape[1] // STEP, self.out.shape[0]
        tile, item = lax.rem(item, tiles), lax.div(item, tiles)
        return tile, lax.rem(item, splits), lax.div(item, splits)

    def _bounds(self, slot, split, chunk):
        """(first of the slot's blocks in this split, how many)."""
        slot = jnp.minimum(slot, self.chunks.shape[0] - 1)
        splits = jnp.int32(self.out.shape[0])
        first = self.starts[slot]
        own = self.starts[slot + 1] - first
        begin = lax.div(own * split, splits)
        count = lax.div(own * (split + 1), splits) - begin
        return first + begin, jnp.where(chunk < self.chunks[slot], count, 0)

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

        return lax.fori_loop(0, self.chunks.shape[0], one, (step, about))[0]

    def _block(self, index):
        return self.order[jnp.minimum(index, self.order.shape[0] - 1)]

    def load(self, item, about, step):
        """Fills the stages of one item; returns the next step of the ring."""
        tile, _, chunk = self._place(item)
        columns, ranks = pl.ds(tile * STEP, STEP), pl.ds(chunk * STEP, STEP)

        def fill(stage, w, block):
            rows, full = pl.ds(block * ROWS, ROWS), self.ring.own.at[w, stage]
            wide, part = self.wide.at[rows, columns], self.ring.x_part(stage, w)
            plgpu.copy_gmem_to_smem(wide, part, full)
            narrow = self.narrow.at[rows, ranks]
            plgpu.copy_gmem_to_smem(narrow, self.ring.w.at[stage, w], full)
            if self.mask is not None:
                index, line = self.mask.token_index.at[rows], self.ring.lines
                plgpu.copy_gmem_to_smem(index, line.at[stage, w], full)

        def of_slot(slot, begin, count, step):
            del slot

            def one(i, carry):
                step, blocks = carry
                ahead = begin + COMPUTE * (i + 1)
                following = tuple(self._block(ahead + w) for w in range(COMPUTE))
                stage = self.ring.acquire(step)
                fill(stage, 0, blocks[0])
                pl.when(COMPUTE * i + 1 < count)(lambda: fill(stage, 1, blocks[1]))
                return step + 1, following

            first = tuple(self._block(begin + w) for w in range(COMPUTE))
            steps = pl.cdiv(count, COMPUTE)
            return lax.fori_loop(0, steps, one, (step, first))[0]

        return self._each_slot(item, about, step, of_slot)

    def compute(self, item, about, step, wg):
        """Computes one item; returns the next step of the ring."""
        tile, split, chunk = self._place(item)

        def of_slot(slot, begin, count, step):
            del begin
            mine = lax.div(count + 1 - wg, COMPUTE)
            if self.mask is not None:
                word = self.mask.word.at[slot, pl.ds(tile * STEP, STEP)]
                features = load_line(word, OF_COLUMN)
                key, threshold = self.mask.key[slot], self.mask.threshold[slot]

            def accumulate(acc):
                def multiply(_, step):
                    stage = self.ring.wait_own(step, wg)
                    wide = self.ring.x_part(stage, wg)
                    narrow = self.ring.w.at[stage, wg]
                    if self.mask is not None:
                        index = load_line(self.ring.lines.at[stage, wg], OF_ROW)
                        tokens = token_words(key, index)
                        drop_in_place(wide, tokens, features, threshold)
                    if self.transposed:
                        plgpu.wgmma(acc, narrow.transpose((1, 0)), wide)
                    else:
                        plgpu.wgmma(acc, wide.transpose((1, 0)), narrow)

                after = self.ring.each_step(mine, step, multiply)
                return acc[...], after

            total, step = pl.run_scoped(
                accumulate, plgpu.ACC((STEP, STEP), jnp.float32)
            )

            # Of an odd number of blocks, the second warpgroup has no last one.
            pl.when((wg == 1) & (lax.rem(count, 2) == 1))(
                lambda: self.ring.release(step)
            )
            step = step + lax.rem(count, 2) * wg

            def store(total):
                self.ring.sum[...] = total
                plgpu.commit_smem()
                k, r = pl.ds(tile * STEP, STEP), pl.ds(chunk * STEP, STEP)
                at = (split, slot, r, k) if self.transposed else (split, slot, k, r)
                plgpu.copy_smem_to_gmem(self.ring.sum, self.out.at[at])

            pl.when(count > 0)(lambda: self.ring.add_up(total, wg, store))

            @pl.when((count == 0) & (wg == 0))
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store(zeros_like(total))

            return step

        return self._each_slot(item, about, step, of_slot)

"""Gradients of A and B: wide^T narrow, summed over each adapter's own rows."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxlora.pallas_kernels.mosaic.mask import (
    OF_COLUMN,
    OF_ROW,
    Mask,
    dropped,
    load_line,
    load_tokens,
)
from jaxlora.pallas_kernels.mosaic.ring import (
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

    An item takes its split's share of the parts of all slots' rows, in turn, and sums
    over the blocks of each in their order, each warpgroup for 64 of the columns. Each
    of the projections that share wide has its own narrow, mask and result.

    Attributes:
        ring: Shared memory.
        wide: x or dy, T K.
        narrow: ds or s, T R, of each projection.
        out: The gradients by part, P K R (P R K when `transposed`), float32; see
            `add_parts`.
        order: Blocks of 64 rows sorted by slot.
        parts: Parts of the rows.
        settings: `KernelSettings` of each projection, with only its own rows.
        masks: Dropout of wide, of each projection; empty: none.
        splits: Number of items that share the parts of one tile.
        transposed: Whether out is P R K.
    """

    ring: Ring
    wide: Any
    narrow: tuple
    out: tuple
    order: Any
    parts: Any
    settings: tuple
    masks: tuple[Mask, ...]
    splits: int
    transposed: bool

    def _place(self, item):
        tiles = pl.cdiv(self.wide.shape[1], TILE_COLUMNS)
        tile, item = lax.rem(item, tiles), lax.div(item, tiles)
        split, chunk = lax.rem(item, self.splits), lax.div(item, self.splits)
        return tile * TILE_COLUMNS, split, chunk

    def _task(self, index, chunk):
        """(slot, place in `out`, first block, blocks) of a part."""
        index = jnp.minimum(index, self.parts.slot.shape[0] - 1)
        slot, begin = self.parts.slot[index], self.parts.begin[index]
        live = chunk < most_chunks(self.settings, slot)
        return slot, index, begin, jnp.where(live, self.parts.count[index], 0)

    def about(self, item):
        """(parts that this split does, the first of them)."""
        _, split, chunk = self._place(item)
        behind = jnp.maximum(self.parts.total[0] - split, 0)
        number = lax.div(behind + self.splits - 1, jnp.int32(self.splits))
        return number, *self._task(split, chunk)

    def _each_part(self, item, about, step, do):
        """`do(task, step)` for each part; reads the next one's task ahead."""
        _, split, chunk = self._place(item)
        number, *first = about

        def one(i, carry):
            step, task = carry
            following = self._task(split + (i + 1) * self.splits, chunk)
            return do(task, step), following

        return lax.fori_loop(0, number, one, (step, tuple(first)))[0]

    def _block(self, index):
        return self.order[jnp.minimum(index, self.order.shape[0] - 1)]

    def _inside(self, column):
        """A column to read: a tile's second half may lie outside."""
        return jnp.minimum(column, self.wide.shape[1] - STEP)

    def load(self, index, item, about, step):
        """Fills the stages of one item; returns the next step of the ring."""
        del index
        column, _, chunk = self._place(item)
        ranks = pl.ds(chunk * STEP, STEP)

        def fill(stage, block):
            rows, full = pl.ds(block * ROWS, ROWS), self.ring.full.at[stage]
            wide = self.wide.at[rows, pl.ds(column, TILE_COLUMNS)]
            plgpu.copy_gmem_to_smem(wide, self.ring.x.at[stage], full)
            for p, narrow in enumerate(self.narrow):
                narrow, part = narrow.at[rows, ranks], self.ring.w.at[stage, p]
                plgpu.copy_gmem_to_smem(narrow, part, full)
            for p, mask in enumerate(self.masks):
                lines = self.ring.lines.at[stage, p]
                plgpu.copy_gmem_to_smem(mask.token.at[block], lines, full)

        def of_part(task, step):
            _, _, begin, count = task

            def one(i, carry):
                step, block = carry
                following = self._block(begin + i + 1)
                fill(self.ring.acquire(step), block)
                return step + 1, following

            return lax.fori_loop(0, count, one, (step, self._block(begin)))[0]

        return self._each_part(item, about, step, of_part)

    def compute(self, item, about, step, wg):
        """Computes one item; returns the next step of the ring."""
        column, _, chunk = self._place(item)
        column = column + wg * STEP

        def of_part(task, step):
            slot, place, _, count = task
            words = [self._words(p, slot, column) for p in range(len(self.masks))]

            def accumulate(*accs):
                def multiply(step):
                    stage = self.ring.wait(step)
                    for p, acc in enumerate(accs):
                        narrow = self.ring.w.at[stage, p]
                        if self.transposed:
                            wide = self.ring.x_part(stage, wg)
                            plgpu.wgmma(acc, narrow.transpose((1, 0)), wide)
                        else:
                            plgpu.wgmma(
                                acc, self._features(stage, wg, p, words), narrow
                            )

                after = self.ring.each_step(
                    count, step, multiply, ahead=0 if self.masks else len(accs)
                )
                return [acc[...] for acc in accs], after

            accs = [plgpu.ACC((STEP, STEP), jnp.float32)] * len(self.narrow)
            totals, step = pl.run_scoped(accumulate, *accs)
            for total, out, one in zip(totals, self.out, self.settings, strict=True):
                # If the slot does not adapt a projection, narrow was not written there.
                mine = lax.broadcast(chunk < one.chunks[slot], total.shape)
                total = jnp.where(mine, total, zeros_like(total))
                self._store(total, out, (place, chunk, column), wg)
            return step

        return self._each_part(item, about, step, of_part)

    def _words(self, p, slot, column):
        """(words of the tile's features, threshold) of a projection's mask."""
        word = self.masks[p].word.at[slot, pl.ds(self._inside(column), STEP)]
        return load_line(word, OF_ROW), self.settings[p].threshold[slot]

    def _features(self, stage, wg, p, words):
        """The stage's wide' as one projection sees it; in registers if masked."""
        wide = self.ring.x_part(stage, wg).transpose((1, 0))
        if not self.masks:
            return wide
        tokens = load_tokens(self.ring.lines.at[stage, p], OF_COLUMN)
        value = plgpu.load(wide, layout=plgpu.Layout.WGMMA)
        return dropped(value, tokens, *words[p], token_axis=1)

    def _store(self, total, out, at, wg):
        place, chunk, column = at

        @pl.when(column < self.wide.shape[1])
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.ring.sum[wg] = total
            plgpu.commit_smem()
            k, r = pl.ds(column, STEP), pl.ds(chunk * STEP, STEP)
            where = (place, r, k) if self.transposed else (place, k, r)
            plgpu.copy_smem_to_gmem(self.ring.sum.at[wg], out.at[where])

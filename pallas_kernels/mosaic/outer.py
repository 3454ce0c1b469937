"""Gradients of A and B: wide^T narrow, summed over each adapter's own rows."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.mask import (
    OF_COLUMN,
    OF_ROW,
    Mask,
    dropped,
    load_line,
    load_tokens,
)
from pallas_kernels.mosaic.ring import (
    COMPUTE,
    ROWS,
    STEP,
    Ring,
    most_chunks,
    zeros_like,
)

TILE_COLUMNS = COMPUTE * STEP
_PART_BLOCKS = 8  # of a slot's rows: a part of fewer costs more to add up than it saves


def parts_of(own_blocks, most):
    """Into how many parts a slot's own rows are split, at most `most`."""
    parts = jnp.clip(lax.div(own_blocks, jnp.int32(_PART_BLOCKS)), 1, most)
    return jnp.where(own_blocks > 0, parts, 0)


def add_parts(
    out: Float[Array, "S G ..."], starts: Int[Array, " G1"]
) -> Float[Array, "G ..."]:
    """The sums over each slot's parts; others were never written."""
    parts = parts_of(starts[1:] - starts[:-1], out.shape[0])
    is_part = jnp.arange(out.shape[0])[:, None] < parts
    is_part = is_part.reshape(is_part.shape + (1,) * (out.ndim - 2))
    return jnp.where(is_part, out, 0).sum(axis=0)


@dataclasses.dataclass(frozen=True)
class Outer:
    """Items are (128 columns of wide, split of the rows, chunk of 64 ranks).

    An item visits every slot and sums over a part of the slot's *own* blocks in their
    order, each warpgroup for 64 of the columns. How many parts a slot has, and what is
    in them, depends on its own rows alone, so a sum's order does not depend on
    neighbours; only which split does a part does, to share them out. Each of the P
    projections that share wide has its own narrow, mask and result.

    Attributes:
        ring: Shared memory.
        wide: x or dy, T K.
        narrow: ds or s, T R, of each projection.
        out: The gradients by part, S G K R (S G R K when `transposed`), float32; see
            `add_parts`.
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
        """(which of the slot's parts this split does, its first block, how many).

        The part is -1 if it does none.
        """
        slot = jnp.minimum(slot, self.chunks[0].shape[0] - 1)
        splits = self.out[0].shape[0]
        first = self.starts[slot]
        own = self.starts[slot + 1] - first
        parts = parts_of(own, splits)
        # The parts of slots that have few go to different splits.
        turn = lax.rem(lax.div(first, jnp.int32(_PART_BLOCKS)), jnp.int32(splits))
        part = lax.rem(split + splits - turn, jnp.int32(splits))
        begin = lax.div(own * part, jnp.maximum(parts, 1))
        count = lax.div(own * (part + 1), jnp.maximum(parts, 1)) - begin
        is_mine = part < parts
        live = is_mine & (chunk < most_chunks(self.chunks, slot))
        return jnp.where(is_mine, part, -1), first + begin, jnp.where(live, count, 0)

    def about(self, item):
        """The first slot's blocks."""
        _, split, chunk = self._place(item)
        return self._bounds(jnp.int32(0), split, chunk)

    def _each_slot(self, item, about, step, do):
        """`do(slot, bounds, step)` for each slot; reads the next one's ahead."""
        _, split, chunk = self._place(item)

        def one(slot, carry):
            step, bounds = carry
            following = self._bounds(slot + 1, split, chunk)
            return do(slot, bounds, step), following

        num_slots = self.chunks[0].shape[0]
        return lax.fori_loop(0, num_slots, one, (step, about))[0]

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

        def of_slot(slot, bounds, step):
            del slot
            _, begin, count = bounds

            def one(i, carry):
                step, block = carry
                following = self._block(begin + i + 1)
                fill(self.ring.acquire(step), block)
                return step + 1, following

            return lax.fori_loop(0, count, one, (step, self._block(begin)))[0]

        return self._each_slot(item, about, step, of_slot)

    def compute(self, item, about, step, wg):
        """Computes one item; returns the next step of the ring."""
        column, _, chunk = self._place(item)
        column = column + wg * STEP

        def of_slot(slot, bounds, step):
            part, _, count = bounds
            words = [self._words(mask, slot, column) for mask in self.masks]

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
            for total, out, chunks in zip(totals, self.out, self.chunks, strict=True):
                # Of a projection that the slot does not adapt, narrow was not written.
                mine = lax.broadcast(chunk < chunks[slot], total.shape)
                total = jnp.where(mine, total, zeros_like(total))
                self._store(total, out, (part, slot, chunk, column), wg)
            return step

        return self._each_slot(item, about, step, of_slot)

    def _words(self, mask, slot, column):
        """(words of the tile's features, threshold)."""
        word = mask.word.at[slot, pl.ds(self._inside(column), STEP)]
        return load_line(word, OF_ROW), mask.threshold[slot]

    def _features(self, stage, wg, p, words):
        """The stage's wide' as one projection sees it; in registers if masked."""
        wide = self.ring.x_part(stage, wg).transpose((1, 0))
        if not self.masks:
            return wide
        tokens = load_tokens(self.ring.lines.at[stage, p], OF_COLUMN)
        value = plgpu.load(wide, layout=plgpu.Layout.WGMMA)
        return dropped(value, tokens, *words[p], token_axis=1)

    def _store(self, total, out, at, wg):
        part, slot, chunk, column = at

        @pl.when((part >= 0) & (column < self.wide.shape[1]))
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.ring.sum[wg] = total
            plgpu.commit_smem()
            k, r = pl.ds(column, STEP), pl.ds(chunk * STEP, STEP)
            where = (part, slot, r, k) if self.transposed else (part, slot, k, r)
            plgpu.copy_smem_to_gmem(self.ring.sum.at[wg], out.at[where])

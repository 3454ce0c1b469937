"""The outer kernel: gradients `dA = dropout(x)^T ds` and `dB = s^T dy` of each slot.

Both are `wide^T narrow`, summed over each slot's own rows; for dB, dy is wide and the
result is transposed.
Grid: one program per multiprocessor, and each takes items in turn. An item is 128
columns of wide, a chunk of 64 ranks, and one of `splits` shares of the parts into which
`parts.py` splits every slot's rows.
Pipeline: a ring of stages, each with a block of 64 rows: 64 x 128 of wide, 64 x 64 of
every narrow, and the words of those tokens' masks. One warpgroup loads; two compute 64
columns each. wide is read once for all projections, and there are no atomics.
See docs/kernels.md.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxlora.pallas_kernels.mosaic.mask import (
    PER_COLUMN,
    PER_ROW,
    Mask,
    apply_mask,
    load_token_words,
    load_words,
)
from jaxlora.pallas_kernels.mosaic.ring import (
    COMPUTE_WGS,
    ROWS,
    STEP,
    Ref,
    Ring,
    max_chunks,
    zeros_like,
)
from jaxlora.pallas_kernels.parts import PartTable

TILE_COLUMNS = COMPUTE_WGS * STEP


@dataclasses.dataclass(frozen=True)
class Outer:
    """Computes the sum of `wide^T narrow` over each part of a slot's rows.

    An item takes every `splits`-th part of all slots, and sums the blocks of each in
    order. Each of the P projections that share wide has its own narrow, mask and
    result.

    Attributes:
        ring: Shared memory.
        wide_gmem: x or dy, [T, K].
        narrow_gmem: ds or s of each projection, [T, R].
        out_gmem: The sum over each part for each projection, [parts, K, R], float32;
            [parts, R, K] if `transposed`. `sum_parts` adds them up.
        order_gmem: Blocks of 64 rows sorted by slot, [NB].
        parts: The parts of all slots' rows.
        settings: `KernelSettings` of each projection, with only its own rows.
        masks: Dropout masks of wide for each projection; empty without dropout.
        splits: Number of items that share the parts of one tile.
        transposed: Whether the result is [parts, R, K].
    """

    ring: Ring
    wide_gmem: Ref
    narrow_gmem: tuple[Ref, ...]
    out_gmem: tuple[Ref, ...]
    order_gmem: Ref
    parts: PartTable
    settings: tuple
    masks: tuple[Mask, ...]
    splits: int
    transposed: bool

    def _tile(self, item):
        """Returns the (first column, split, chunk of ranks) of an item."""
        num_tiles = pl.cdiv(self.wide_gmem.shape[1], TILE_COLUMNS)
        tile, item = lax.rem(item, num_tiles), lax.div(item, num_tiles)
        split, chunk = lax.rem(item, self.splits), lax.div(item, self.splits)
        return tile * TILE_COLUMNS, split, chunk

    def _part(self, index, chunk):
        """Reads the (slot, index, first block, number of blocks) of a part."""
        index = jnp.minimum(index, self.parts.slot.shape[0] - 1)
        slot, first_block = self.parts.slot[index], self.parts.first_block[index]
        live = chunk < max_chunks(self.settings, slot)
        num_blocks = jnp.where(live, self.parts.num_blocks[index], 0)
        return slot, index, first_block, num_blocks

    def prefetch(self, item):
        """Reads (number of the item's parts, its first part)."""
        _, split, chunk = self._tile(item)
        behind = jnp.maximum(self.parts.num_parts[0] - split, 0)
        num_parts = lax.div(behind + self.splits - 1, jnp.int32(self.splits))
        return num_parts, *self._part(split, chunk)

    def _each_part(self, item, prefetched, step, do):
        """Calls `do(part, step)` for each part; reads the next part meanwhile."""
        _, split, chunk = self._tile(item)
        num_parts, *first = prefetched

        def one(i, carry):
            step, part = carry
            following = self._part(split + (i + 1) * self.splits, chunk)
            return do(part, step), following

        return lax.fori_loop(0, num_parts, one, (step, tuple(first)))[0]

    def _block(self, index):
        return self.order_gmem[jnp.minimum(index, self.order_gmem.shape[0] - 1)]

    def _clamp_column(self, column):
        """Clamps a column to the last 64, as a tile's second half may lie outside."""
        return jnp.minimum(column, self.wide_gmem.shape[1] - STEP)

    def load(self, index, item, prefetched, step):
        """Fills the stages of one item; returns the next step of the ring."""
        del index
        column, _, chunk = self._tile(item)
        ranks = pl.ds(chunk * STEP, STEP)

        def fill(stage, block):
            rows, full = pl.ds(block * ROWS, ROWS), self.ring.stage_full.at[stage]
            wide_gmem = self.wide_gmem.at[rows, pl.ds(column, TILE_COLUMNS)]
            plgpu.copy_gmem_to_smem(wide_gmem, self.ring.x_smem.at[stage], full)
            for p, narrow in enumerate(self.narrow_gmem):
                narrow_gmem, to_smem = narrow.at[rows, ranks], self.ring.w_smem
                plgpu.copy_gmem_to_smem(narrow_gmem, to_smem.at[stage, p], full)
            for p, mask in enumerate(self.masks):
                words_smem = self.ring.stage_words_smem.at[stage, p]
                plgpu.copy_gmem_to_smem(mask.tokens.at[block], words_smem, full)

        def load_part(part, step):
            _, _, first_block, num_blocks = part

            def one(i, carry):
                step, block = carry
                following = self._block(first_block + i + 1)
                fill(self.ring.acquire(step), block)
                return step + 1, following

            start = step, self._block(first_block)
            return lax.fori_loop(0, num_blocks, one, start)[0]

        return self._each_part(item, prefetched, step, load_part)

    def compute(self, item, prefetched, step, wg):
        """Computes one item; returns the next step of the ring."""
        column, _, chunk = self._tile(item)
        column = column + wg * STEP

        def compute_part(part, step):
            slot, index, _, num_blocks = part
            words = [self._words(p, slot, column) for p in range(len(self.masks))]

            def accumulate(*accs):
                def multiply(step):
                    stage = self.ring.wait(step)
                    for p, acc in enumerate(accs):
                        narrow_smem = self.ring.w_smem.at[stage, p]
                        if self.transposed:
                            wide_smem = self.ring.x_half(stage, wg)
                            plgpu.wgmma(acc, narrow_smem.transpose((1, 0)), wide_smem)
                        else:
                            wide = self._wide(stage, wg, p, words)
                            plgpu.wgmma(acc, wide, narrow_smem)

                num_in_flight = 0 if self.masks else len(accs)
                after = self.ring.each_step(num_blocks, step, multiply, num_in_flight)
                return [acc[...] for acc in accs], after

            accs = [plgpu.ACC((STEP, STEP), jnp.float32)] * len(self.narrow_gmem)
            sums, step = pl.run_scoped(accumulate, *accs)
            for total, out, one in zip(sums, self.out_gmem, self.settings, strict=True):
                # narrow was not written if the slot does not adapt the projection.
                adapted = lax.broadcast(chunk < one.num_chunks[slot], total.shape)
                total = jnp.where(adapted, total, zeros_like(total))
                self._store(total, out, (index, chunk, column), wg)
            return step

        return self._each_part(item, prefetched, step, compute_part)

    def _words(self, p, slot, column):
        """Reads (words of 64 features, threshold) of a projection's mask."""
        columns = pl.ds(self._clamp_column(column), STEP)
        words = load_words(self.masks[p].features.at[slot, columns], PER_ROW)
        return words, self.settings[p].threshold[slot]

    def _wide(self, stage, wg, p, words):
        """Returns wide^T for projection p: in registers if masked, else in smem."""
        wide_smem = self.ring.x_half(stage, wg).transpose((1, 0))
        if not self.masks:
            return wide_smem
        tokens = load_token_words(self.ring.stage_words_smem.at[stage, p], PER_COLUMN)
        wide = plgpu.load(wide_smem, layout=plgpu.Layout.WGMMA)
        return apply_mask(wide, tokens, *words[p], token_axis=1)

    def _store(self, total, out_gmem, at, wg):
        index, chunk, column = at

        @pl.when(column < self.wide_gmem.shape[1])
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.ring.sum_smem[wg] = total
            plgpu.commit_smem()
            k, r = pl.ds(column, STEP), pl.ds(chunk * STEP, STEP)
            where = (index, r, k) if self.transposed else (index, k, r)
            plgpu.copy_smem_to_gmem(self.ring.sum_smem.at[wg], out_gmem.at[where])

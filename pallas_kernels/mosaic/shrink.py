"""The shrink kernel: `s = factor * dropout(x) A` for projections that share x.

Grid: one program per multiprocessor, and each takes items in turn. An item is a block
of 64 rows and a chunk of at most 64 ranks.
Pipeline: a ring of stages, each with 64 x 128 of x, the same 128 features of every A,
and the words of those features' masks. One warpgroup loads; two compute, each on 64 of
the 128 features, and add up at the end. x is read once for all projections.
See docs/kernels.md.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxlora.pallas_kernels.mosaic.mask import (
    Mask,
    Vectors,
    apply_mask,
)
from jaxlora.pallas_kernels.mosaic.ring import Ref, Ring, max_chunks
from jaxlora.pallas_kernels.mosaic.ring_shape import COMPUTE_WGS, ROWS, STEP


@dataclasses.dataclass(frozen=True)
class Shrink:
    """Computes items of s; consecutive items have consecutive blocks of rows.

    An item reads only its own block's adapter. Each of the P projections has its own
    A, mask and result.

    Attributes:
        ring: Shared memory.
        x_gmem: [T, K].
        a_gmem: A of each projection, [G, R, K].
        s_gmem: The result of each projection, [T, R].
        slot_gmem: Slot of each block of 64 rows, [NB]; -1 for padding.
        settings: `KernelSettings` of each projection, with only its own rows.
        masks: Dropout masks of x for each projection; empty without dropout.
    """

    ring: Ring
    x_gmem: Ref
    a_gmem: tuple[Ref, ...]
    s_gmem: tuple[Ref, ...]
    slot_gmem: Ref
    settings: tuple
    masks: tuple[Mask, ...]

    def _block_and_chunk(self, item):
        num_blocks = self.slot_gmem.shape[0]
        return lax.rem(item, num_blocks), lax.div(item, num_blocks)

    def prefetch(self, item):
        """Reads (slot, number of reduction steps) of an item."""
        block, chunk = self._block_and_chunk(item)
        slot = self.slot_gmem[block]
        safe_slot = jnp.maximum(slot, 0)
        num_steps = pl.cdiv(self.x_gmem.shape[1], COMPUTE_WGS * STEP)
        live = (slot >= 0) & self._is_needed(chunk, safe_slot)
        return safe_slot, jnp.where(live, jnp.int32(num_steps), 0)

    def _is_needed(self, chunk, slot):
        """Returns whether a slot that has rows needs a chunk of ranks."""
        return chunk < max_chunks(self.settings, slot)

    def load(self, index, item, prefetched, step):
        """Fills the stages of one item; returns the next step of the ring."""
        del index
        (block, chunk), (slot, num_steps) = self._block_and_chunk(item), prefetched
        rows = pl.ds(block * ROWS, ROWS)

        def fill(i, step):
            stage = self.ring.acquire(step)
            ks, full = (
                pl.ds(i * COMPUTE_WGS * STEP, COMPUTE_WGS * STEP),
                self.ring.stage_full.at[stage],
            )
            x_smem = self.ring.x_smem.at[stage]
            plgpu.copy_gmem_to_smem(self.x_gmem.at[rows, ks], x_smem, full)
            self._fill_operands(stage, block, slot, chunk, ks, full)
            self._fill_more(stage, ks, full)
            return step + 1

        return lax.fori_loop(0, num_steps, fill, step)

    def _fill_operands(self, stage, block, slot, chunk, ks, full) -> None:
        """Starts the copies of A and of the masks' words for a stage's features."""
        width = self.ring.shape.w_tile[1]
        ranks = pl.ds(chunk * width, width)
        for p, a_gmem in enumerate(self.a_gmem):
            a_smem = self.ring.w_smem.at[stage, p]
            plgpu.copy_gmem_to_smem(a_gmem.at[slot, ranks, ks], a_smem, full)
        for p, mask in enumerate(self.masks):
            words_smem = self.ring.stage_words_smem.at[stage, p]
            words = mask.shrink_words(block, slot, ks)
            plgpu.copy_gmem_to_smem(words, words_smem, full)

    def _fill_more(self, stage, features, full) -> None:
        """Starts the copies of a stage that a kernel with more results needs."""

    def compute(self, item, prefetched, step, wg):
        """Computes one item; returns the next step of the ring."""
        (block, _), (slot, num_steps) = self._block_and_chunk(item), prefetched
        rows, width = pl.ds(block * ROWS, ROWS), self.ring.shape.w_tile[1]
        tokens = [mask.shrink_tokens(block) for mask in self.masks]
        row_vectors = self._row_vectors(rows)

        def accumulate(*accs):
            def multiply(now):
                stage = self.ring.wait(now)
                for p, acc in enumerate(accs):
                    x = self._x(stage, wg, p, tokens, slot)
                    a_smem = self.ring.w_smem.at[stage, p, :, pl.ds(wg * STEP, STEP)]
                    plgpu.wgmma(acc, x, a_smem.transpose((1, 0)))
                self._use_stage(stage, item, now - step, row_vectors, wg)

            num_in_flight = 0 if self.masks else len(accs)
            after = self.ring.each_step(num_steps, step, multiply, num_in_flight)
            return [acc[...] for acc in accs], after

        accs = [plgpu.ACC((ROWS, width), jnp.float32)] * len(self.a_gmem)
        sums, step = pl.run_scoped(accumulate, *accs)
        self._finish(sums, item, prefetched, wg, row_vectors)
        return step

    def _finish(self, sums, item, prefetched, wg, row_vectors) -> None:
        """Adds up both warpgroups' sums and starts the copies of s."""
        (block, chunk), (slot, num_steps) = self._block_and_chunk(item), prefetched
        width = self.ring.shape.w_tile[1]
        at = pl.ds(block * ROWS, ROWS), pl.ds(chunk * width, width)
        for p, (s, settings) in enumerate(zip(sums, self.settings, strict=True)):

            def store(s, p=p, factor=settings.factor):
                self._store(s * factor[slot], p, at, row_vectors)

            pl.when(num_steps > 0)(
                lambda s=s, store=store: self.ring.sum_warpgroups(s, wg, store)
            )

    def _row_vectors(self, rows) -> tuple:
        """Reads what a kernel with more results needs of an item's rows."""
        del rows
        return ()

    def _use_stage(self, stage, item, i, row_vectors, wg) -> None:
        """Computes further results from the i-th stage of an item."""

    def _store(self, s, p, at, row_vectors) -> None:
        """Starts the copy of projection p's s to device memory."""
        del row_vectors
        self._copy_out(s, self.s_gmem[p].at[at])

    def _copy_out(self, s, s_gmem) -> None:
        out_smem = self.ring.out_smem
        out_smem[...] = s.astype(s_gmem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, s_gmem)

    def _x(self, stage, wg, p, tokens, slot):
        """Returns dropout(x) of projection p: in registers if masked, else in smem."""
        x_smem = self.ring.x_half(stage, wg)
        if not self.masks:
            return x_smem
        x = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA)
        return self._masked(x, stage, wg, p, tokens, slot)

    def _masked(self, x, stage, wg, p, tokens, slot):
        """Returns dropout(x) of projection p for x in registers."""
        if not self.masks:
            return x
        mask, words_smem = self.masks[p], self.ring.stage_words_smem
        features = mask.shrink_features(words_smem, stage, p, wg)
        threshold = mask.threshold(self.settings[p], slot)
        return apply_mask(x, mask, Vectors(tokens[p], features), threshold)

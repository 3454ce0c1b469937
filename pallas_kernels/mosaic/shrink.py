"""s = factor * dropout(x) A: one read of x, only the token block's own adapter."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dropout import token_words
from pallas_kernels.mosaic.mask import OF_COLUMN, OF_ROW, Mask, drop_in_place, load_line
from pallas_kernels.mosaic.ring import COMPUTE, ROWS, STEP, Ring


@dataclasses.dataclass(frozen=True)
class Shrink:
    """Items are (block of 64 rows, chunk of 64 ranks), the block running fastest.

    The warpgroups take alternate steps of the reduction and add up at the end.

    Attributes:
        ring: Shared memory.
        x: T K.
        a: G R K.
        s: The result, T R.
        factor: What s is multiplied by, G.
        slot: Slot of each block of 64 rows, -1 for nobody.
        chunks: Chunks of 64 ranks that each slot fills, G.
        mask: Dropout of x, or None.
    """

    ring: Ring
    x: Any
    a: Any
    s: Any
    factor: Any
    slot: Any
    chunks: Any
    mask: Mask | None

    def _place(self, item):
        num_blocks = self.slot.shape[0]
        return lax.rem(item, num_blocks), lax.div(item, num_blocks)

    def about(self, item):
        """(slot, steps of the reduction)."""
        block, chunk = self._place(item)
        slot = self.slot[block]
        here = jnp.maximum(slot, 0)
        live = (slot >= 0) & (chunk < self.chunks[here])
        steps = pl.cdiv(self.x.shape[1], COMPUTE * STEP)
        return here, jnp.where(live, jnp.int32(steps), 0)

    def load(self, item, about, step):
        """Fills the stages of one item; returns the next step of the ring."""
        (block, chunk), (slot, steps) = self._place(item), about
        rows, width = pl.ds(block * ROWS, ROWS), self.ring.shape.out_tile[-1]
        ranks = pl.ds(chunk * width, width)

        def one(i, step):
            stage = self.ring.acquire(step)
            for w in range(COMPUTE):
                ks = pl.ds((COMPUTE * i + w) * STEP, STEP)
                full = self.ring.own.at[w, stage]
                x, part = self.x.at[rows, ks], self.ring.x_part(stage, w)
                plgpu.copy_gmem_to_smem(x, part, full)
                a, part = self.a.at[slot, ranks, ks], self.ring.w.at[stage, w]
                plgpu.copy_gmem_to_smem(a, part, full)
                if self.mask is not None:
                    word = self.mask.word.at[slot, ks]
                    plgpu.copy_gmem_to_smem(word, self.ring.lines.at[stage, w], full)
            return step + 1

        return lax.fori_loop(0, steps, one, step)

    def compute(self, item, about, step, wg):
        """Computes one item; returns the next step of the ring."""
        (block, chunk), (slot, steps) = self._place(item), about
        rows, width = pl.ds(block * ROWS, ROWS), self.ring.shape.out_tile[-1]
        if self.mask is not None:
            index = load_line(self.mask.token_index.at[rows], OF_ROW)
            tokens = token_words(self.mask.key[slot], index)
            threshold = self.mask.threshold[slot]

        def accumulate(acc):
            def multiply(_, step):
                stage = self.ring.wait_own(step, wg)
                x = self.ring.x_part(stage, wg)
                if self.mask is not None:
                    features = load_line(self.ring.lines.at[stage, wg], OF_COLUMN)
                    drop_in_place(x, tokens, features, threshold)
                plgpu.wgmma(acc, x, self.ring.w.at[stage, wg].transpose((1, 0)))

            after = self.ring.each_step(steps, step, multiply)
            return acc[...], after

        s, step = pl.run_scoped(accumulate, plgpu.ACC((ROWS, width), jnp.float32))

        def store(s):
            out = self.ring.out.at[0, 0]
            out[...] = (s * self.factor[slot]).astype(self.s.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, self.s.at[rows, pl.ds(chunk * width, width)])

        pl.when(steps > 0)(lambda: self.ring.add_up(s, wg, store))
        return step

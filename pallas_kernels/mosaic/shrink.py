"""s = factor * dropout(x) A: one read of x, only the token block's own adapter."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dropout import token_words
from pallas_kernels.mosaic.mask import OF_COLUMN, OF_ROW, Mask, dropped, load_line
from pallas_kernels.mosaic.ring import COMPUTE, ROWS, STEP, Ring


@dataclasses.dataclass(frozen=True)
class Shrink:
    """Items are (block of 64 rows, chunk of 64 ranks), the block running fastest.

    The warpgroups take alternate steps of the reduction and add up at the end.

    Attributes:
        ring: Shared memory.
        x: T K.
        a: G K R, or G R K when `a_transposed`.
        s: The result, T R.
        factor: What s is multiplied by, G.
        slot: Slot of each block of 64 rows, -1 for nobody.
        chunks: Chunks of 64 ranks that each slot fills, G.
        mask: Dropout of x, or None.
        a_transposed: Whether a is G R K.
    """

    ring: Ring
    x: Any
    a: Any
    s: Any
    factor: Any
    slot: Any
    chunks: Any
    mask: Mask | None
    a_transposed: bool

    def _item(self, item):
        num_blocks = self.slot.shape[0]
        block, chunk = lax.rem(item, num_blocks), lax.div(item, num_blocks)
        slot = self.slot[block]
        here = jnp.maximum(slot, 0)
        live = (slot >= 0) & (chunk < self.chunks[here])
        steps = pl.cdiv(self.x.shape[1], COMPUTE * STEP)
        return block, chunk, here, jnp.where(live, jnp.int32(steps), 0)

    def load(self, item, step):
        """Fills the stages of one item; returns the next step of the ring."""
        block, chunk, slot, steps = self._item(item)
        rows, ranks = pl.ds(block * ROWS, ROWS), pl.ds(chunk * STEP, STEP)

        def one(i, step):
            stage = self.ring.acquire(step)
            for w in range(COMPUTE):
                ks = pl.ds((COMPUTE * i + w) * STEP, STEP)
                full = self.ring.own.at[w, stage]
                x, part = self.x.at[rows, ks], self.ring.x_part(stage, w)
                plgpu.copy_gmem_to_smem(x, part, full)
                a = self.a.at[
                    (slot, ranks, ks) if self.a_transposed else (slot, ks, ranks)
                ]
                plgpu.copy_gmem_to_smem(a, self.ring.w_part(stage, w), full)
                if self.mask is not None:
                    word = self.mask.word.at[slot, ks]
                    plgpu.copy_gmem_to_smem(word, self.ring.lines.at[stage, w], full)
            return step + 1

        return lax.fori_loop(0, steps, one, step)

    def compute(self, item, step, wg):
        """Computes one item; returns the next step of the ring."""
        block, chunk, slot, steps = self._item(item)
        rows = pl.ds(block * ROWS, ROWS)
        if self.mask is not None:
            index = load_line(self.mask.token_index.at[rows], OF_ROW)
            tokens = token_words(self.mask.key[slot], index)
            threshold = self.mask.threshold[slot]

        def accumulate(acc):
            def multiply(_, step):
                stage = self.ring.wait_own(step, wg)
                x, a = self.ring.x_part(stage, wg), self.ring.w_part(stage, wg)
                if self.mask is not None:
                    features = load_line(self.ring.lines.at[stage, wg], OF_COLUMN)
                    kept = self.ring.w_part(stage, COMPUTE + wg)
                    x = plgpu.load(x, layout=plgpu.Layout.WGMMA)
                    kept[...] = dropped(x, tokens, features, threshold)
                    plgpu.commit_smem()
                    x = kept
                plgpu.wgmma(acc, x, a.transpose((1, 0)) if self.a_transposed else a)

            after = self.ring.each_step(steps, step, multiply)
            return acc[...], after

        s, step = pl.run_scoped(accumulate, plgpu.ACC((ROWS, STEP), jnp.float32))

        def store(s):
            out = self.ring.out.at[0, 0]
            out[...] = (s * self.factor[slot]).astype(self.s.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, self.s.at[rows, pl.ds(chunk * STEP, STEP)])

        pl.when(steps > 0)(lambda: self.ring.add_up(s, wg, store))
        return step

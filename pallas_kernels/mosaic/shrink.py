"""s = factor * dropout(x) A for several A at once: one read of x for all of them."""

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
from jaxlora.pallas_kernels.mosaic.ring import COMPUTE, ROWS, STEP, Ring, most_chunks


@dataclasses.dataclass(frozen=True)
class Shrink:
    """Items are (block of 64 rows, chunk of 64 ranks), the block running fastest.

    Only the block's own adapter is read. The warpgroups take alternate steps of the
    reduction and add up at the end. Each of the P projections that share x has its own
    A, mask and result.

    Attributes:
        ring: Shared memory.
        x: T K.
        a: G R K, of each projection.
        s: The results, T R.
        slot: Slot of each block of 64 rows, -1 for padding.
        settings: `KernelSettings` of each projection, with only its own rows.
        masks: Dropout of x, of each projection; empty: none.
    """

    ring: Ring
    x: Any
    a: tuple
    s: tuple
    slot: Any
    settings: tuple
    masks: tuple[Mask, ...]

    def _place(self, item):
        num_blocks = self.slot.shape[0]
        return lax.rem(item, num_blocks), lax.div(item, num_blocks)

    def about(self, item):
        """(slot, steps of the reduction)."""
        block, chunk = self._place(item)
        slot = self.slot[block]
        here = jnp.maximum(slot, 0)
        steps = pl.cdiv(self.x.shape[1], COMPUTE * STEP)
        live = (slot >= 0) & (chunk < most_chunks(self.settings, here))
        return here, jnp.where(live, jnp.int32(steps), 0)

    def load(self, index, item, about, step):
        """Fills the stages of one item; returns the next step of the ring."""
        del index
        (block, chunk), (slot, steps) = self._place(item), about
        rows, width = pl.ds(block * ROWS, ROWS), self.ring.shape.w_tile[1]
        ranks = pl.ds(chunk * width, width)

        def one(i, step):
            stage = self.ring.acquire(step)
            ks, full = (
                pl.ds(i * COMPUTE * STEP, COMPUTE * STEP),
                self.ring.full.at[stage],
            )
            plgpu.copy_gmem_to_smem(self.x.at[rows, ks], self.ring.x.at[stage], full)
            for p, a in enumerate(self.a):
                part = self.ring.w.at[stage, p]
                plgpu.copy_gmem_to_smem(a.at[slot, ranks, ks], part, full)
            for p, mask in enumerate(self.masks):
                line = self.ring.lines.at[stage, p]
                plgpu.copy_gmem_to_smem(mask.word.at[slot, ks], line, full)
            return step + 1

        return lax.fori_loop(0, steps, one, step)

    def compute(self, item, about, step, wg):
        """Computes one item; returns the next step of the ring."""
        (block, chunk), (slot, steps) = self._place(item), about
        rows, width = pl.ds(block * ROWS, ROWS), self.ring.shape.w_tile[1]
        tokens = [load_tokens(mask.token.at[block], OF_ROW) for mask in self.masks]

        def accumulate(*accs):
            def multiply(step):
                stage = self.ring.wait(step)
                for p, acc in enumerate(accs):
                    x = self._x(stage, wg, p, tokens, slot)
                    a = self.ring.w.at[stage, p, :, pl.ds(wg * STEP, STEP)]
                    plgpu.wgmma(acc, x, a.transpose((1, 0)))

            after = self.ring.each_step(
                steps, step, multiply, ahead=0 if self.masks else len(accs)
            )
            return [acc[...] for acc in accs], after

        accs = [plgpu.ACC((ROWS, width), jnp.float32)] * len(self.a)
        sums, step = pl.run_scoped(accumulate, *accs)
        for s, out, settings in zip(sums, self.s, self.settings, strict=True):

            def store(s, to=out, factor=settings.factor):
                out = self.ring.out
                out[...] = (s * factor[slot]).astype(to.dtype)
                plgpu.commit_smem()
                ranks = pl.ds(chunk * width, width)
                plgpu.copy_smem_to_gmem(out, to.at[rows, ranks])

            pl.when(steps > 0)(lambda s=s, store=store: self.ring.add_up(s, wg, store))
        return step

    def _x(self, stage, wg, p, tokens, slot):
        """The stage's x as one projection sees it; in registers if it is masked."""
        x = self.ring.x_part(stage, wg)
        if not self.masks:
            return x
        line = self.ring.lines.at[stage, p, pl.ds(wg * STEP, STEP)]
        word = load_line(line, OF_COLUMN)
        value = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        return dropped(value, tokens[p], word, self.settings[p].threshold[slot])

"""y = x W + bias + mask * (s B): the frozen product and the adapters' in one pass."""

import dataclasses
import functools
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
    COLUMNS,
    COMPUTE,
    ROWS,
    STEP,
    Ring,
    zeros_like,
)

TILE_ROWS = COMPUTE * ROWS


@dataclasses.dataclass(frozen=True)
class Expand:
    """Items are tiles of y, 128 x 256, of which each warpgroup computes 64 rows.

    Those have one adapter, as a token block is a multiple of 64 rows. The steps over K
    come first, then a step for each 64 ranks of the tile's adapters. Without a mask
    all land in one accumulator; with one, s B is masked on its way out. Terms of
    several projections (their gradients of a shared x) are summed in the accumulator.

    Attributes:
        ring: Shared memory.
        x: T K, of each projection.
        w: L K N, or L N K when `transposed`, of each projection.
        layer: Which of the L layers, 1.
        s: T R, of each projection.
        b: G R N, or G N R when `transposed`, of each projection.
        y: The result, T N; zero in padding rows.
        slot: Slot of each block of 64 rows, -1 for padding.
        settings: `KernelSettings` of each projection, with only its own rows.
        bias: N, or None.
        masks: Dropout of s B, of each projection; empty: none.
        transposed: Whether w and b are stored transposed.
        band: Tiles of rows that are visited together, for locality in the L2 cache.
    """

    ring: Ring
    x: tuple
    w: tuple
    layer: Any
    s: tuple
    b: tuple
    y: Any
    slot: Any
    settings: tuple
    bias: Any
    masks: tuple[Mask, ...]
    transposed: bool
    band: int

    def _item(self, item):
        t, n = self.y.shape
        tiles = (pl.cdiv(t, TILE_ROWS), pl.cdiv(n, COLUMNS))
        m, n = plgpu.planar_snake(item, tiles, 0, self.band)
        return m * COMPUTE, n * COLUMNS

    def _slot(self, block):
        inside = block < self.slot.shape[0]
        slot = self.slot[jnp.where(inside, block, 0)]
        return jnp.where(inside, slot, -1)

    def about(self, item):
        """(slots of the two blocks of rows, chunks of their ranks by projection)."""
        block, _ = self._item(item)
        slots = self._slot(block), self._slot(block + 1)
        return slots, tuple(
            tuple(self._ranks(settings.chunks, slot) for slot in slots)
            for settings in self.settings
        )

    def _ranks(self, chunks, slot):
        return jnp.where(slot < 0, 0, chunks[jnp.maximum(slot, 0)])

    def _k_steps(self, p, slots):
        steps = jnp.int32(pl.cdiv(self.x[p].shape[1], STEP))
        return jnp.where((slots[0] >= 0) | (slots[1] >= 0), steps, 0)

    def _span(self, slots, ranks, wg):
        """(rank steps to skip, own ones of each projection, those to skip after).

        The first warpgroup's come first; those of one slot serve both.
        """
        totals = [sum(of_slots) for of_slots in zip(*ranks, strict=True)]
        before = jnp.where((wg == 0) | (slots[0] == slots[1]), 0, totals[0])
        own = [jnp.where(wg == 0, first, second) for first, second in ranks]
        second = jnp.where(slots[0] == slots[1], 0, totals[1])
        return before, own, totals[0] + second - before - sum(own)

    def load(self, index, item, about, step):
        """Fills the stages of one tile; returns the next step of the ring."""
        block, column = self._item(item)
        slots, ranks = about
        rows, columns = pl.ds(block * ROWS, TILE_ROWS), pl.ds(column, COLUMNS)

        def fill(i, step, *, left, right, which):
            stage = self.ring.acquire(step)
            ks = pl.ds(i * STEP, STEP)
            at = (which, columns, ks) if self.transposed else (which, ks, columns)
            full = self.ring.full.at[stage]
            plgpu.copy_gmem_to_smem(left.at[rows, ks], self.ring.x.at[stage], full)
            plgpu.copy_gmem_to_smem(right.at[at], self.ring.w.at[stage], full)
            return step + 1

        for p, (x, w) in enumerate(zip(self.x, self.w, strict=True)):
            one = functools.partial(fill, left=x, right=w, which=self.layer[0])
            step = lax.fori_loop(0, self._k_steps(p, slots), one, step)
        if self.masks:
            pl.when(index > 0)(lambda: plgpu.barrier_wait(self.ring.heard))
            self._tell(slots, block, column)
        for i, slot in enumerate(slots):
            shared = (i == 1) & (slots[0] == slots[1])
            for s, b, counts in zip(self.s, self.b, ranks, strict=True):
                one = functools.partial(fill, left=s, right=b, which=slot)
                step = lax.fori_loop(0, jnp.where(shared, 0, counts[i]), one, step)
        return step

    def _tell(self, slots, block, column):
        """Fills the words of the tile's masks."""
        features, tokens = self.ring.words
        for p, mask in enumerate(self.masks):
            for w, slot in enumerate(slots):
                columns = pl.ds(column, COLUMNS)
                word = mask.word.at[jnp.maximum(slot, 0), columns]
                plgpu.copy_gmem_to_smem(word, features.at[p, w], self.ring.told)
                # A tile's second half may lie outside.
                inside = jnp.minimum(block + w, self.slot.shape[0] - 1)
                token = mask.token.at[inside]
                plgpu.copy_gmem_to_smem(token, tokens.at[p, w], self.ring.told)

    def _skip(self, count, step):
        def one(_, step):
            self.ring.wait(step)
            self.ring.release(step)
            return step + 1

        return lax.fori_loop(0, count, one, step)

    def compute(self, item, about, step, wg):
        """Computes one tile; returns the next step of the ring."""
        block, column = self._item(item)
        slots, ranks = about
        slot, row = jnp.where(wg == 0, slots[0], slots[1]), (block + wg) * ROWS
        before, own, behind = self._span(slots, ranks, wg)

        def accumulate(acc):
            def multiply(step):
                stage = self.ring.wait(step)
                w = self.ring.w.at[stage]
                w = w.transpose((1, 0)) if self.transposed else w
                plgpu.wgmma(acc, self.ring.x_part(stage, wg), w)

            after = step
            for p in range(len(self.x)):
                after = self.ring.each_step(self._k_steps(p, slots), after, multiply)
            after = self._skip(before, after)
            if not self.masks:
                after = self.ring.each_step(sum(own), after, multiply)
            return acc[...], after

        y, step = pl.run_scoped(accumulate, plgpu.ACC((ROWS, COLUMNS), jnp.float32))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.masks:
            plgpu.barrier_wait(self.ring.told)
            here = jnp.maximum(slot, 0)
            thresholds = [settings.threshold[here] for settings in self.settings]

            @pl.loop(0, sum(own))
            def _(i):
                self.ring.wait(step + i)

        for i in range(COLUMNS // STEP):
            start = column + i * STEP

            @pl.when((start < self.y.shape[1]) & (row < self.y.shape[0]))
            def _(i=i, start=start):
                part = y[:, i * STEP : (i + 1) * STEP]
                if self.masks:
                    part = self._add_masked(part, i, step, own, thresholds, wg)
                self._store(part, i, slot, row, start, wg)

        if self.masks:
            plgpu.barrier_arrive(self.ring.heard)

            @pl.loop(0, sum(own))
            def _(i):
                self.ring.release(step + i)

            step = step + sum(own)
        return self._skip(behind, step)

    def _w_columns(self, stage, i):
        """The i-th 64 columns of a stage's w, as a right-hand side."""
        part = pl.ds(i * STEP, STEP)
        if self.transposed:
            return self.ring.w.at[stage, part].transpose((1, 0))
        return self.ring.w.at[stage, :, part]

    def _add_masked(self, y, i, step, own, thresholds, wg):
        """y, the tile's i-th 64 columns, + mask * (s B) of each projection.

        The stages of all rank steps are held meanwhile.
        """
        features, tokens = self.ring.words

        def add(p, carry):
            y, begin = carry
            count, threshold = _pick(own, p), _pick(thresholds, p)

            def accumulate(acc):
                def multiply(j, _):
                    stage = self.ring.slot(begin + j)
                    b = self._w_columns(stage, i)
                    plgpu.wgmma(acc, self.ring.x_part(stage, wg), b)

                lax.fori_loop(0, count, multiply, None)
                return acc[...]

            term = pl.run_scoped(accumulate, plgpu.ACC((ROWS, STEP), jnp.float32))
            word = features.at[p, wg, pl.ds(i * STEP, STEP)]
            words = load_tokens(tokens.at[p, wg], OF_ROW), load_line(word, OF_COLUMN)
            return y + dropped(term, *words, threshold), begin + count

        return lax.fori_loop(0, len(self.masks), add, (y, step))[0]

    def _store(self, y, i, slot, row, column, wg):
        """Starts the copy of the tile's i-th 64 columns to device memory."""
        columns, buffers = pl.ds(column, STEP), self.ring.out.shape[1]
        if self.bias is not None:
            bias = load_line(self.bias.at[columns], OF_COLUMN)
            y = y + lax.broadcast_in_dim(bias.astype(jnp.float32), y.shape, (1,))
        y = jnp.where(lax.broadcast(slot < 0, y.shape), zeros_like(y), y)
        plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
        out = self.ring.out.at[wg, i % buffers]
        out[...] = y.astype(self.y.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, self.y.at[pl.ds(row, ROWS), columns])


def _pick(values, index):
    """values[index] of a list of scalars, the index known when the kernel runs."""
    out = values[0]
    for i, value in enumerate(values[1:], 1):
        out = jnp.where(index == i, value, out)
    return out

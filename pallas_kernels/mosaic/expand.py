"""y = x W + bias + mask * (s B): the frozen product and the adapters' in one pass."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dropout import token_words
from pallas_kernels.mosaic.mask import OF_COLUMN, OF_ROW, Mask, dropped, load_line
from pallas_kernels.mosaic.ring import (
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
    both land in one accumulator; with one, s B is masked on its way out.

    Attributes:
        ring: Shared memory.
        x: T K.
        w: L K N, or L N K when `transposed`.
        layer: Which of the L layers, 1.
        s: T R.
        b: G R N, or G N R when `transposed`.
        y: The result, T N; zero in the rows of nobody.
        slot: Slot of each block of 64 rows, -1 for nobody.
        chunks: Chunks of 64 ranks that each slot fills, G.
        bias: N, or None.
        mask: Dropout of s B, or None.
        transposed: Whether w and b are stored so.
        band: Tiles of rows that are visited together, for the sake of the L2 cache.
    """

    ring: Ring
    x: Any
    w: Any
    layer: Any
    s: Any
    b: Any
    y: Any
    slot: Any
    chunks: Any
    bias: Any
    mask: Mask | None
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
        """(slots of the two blocks of rows, chunks of their ranks)."""
        block, _ = self._item(item)
        slots = self._slot(block), self._slot(block + 1)
        return slots, tuple(self._ranks(slot) for slot in slots)

    def _ranks(self, slot):
        return jnp.where(slot < 0, 0, self.chunks[jnp.maximum(slot, 0)])

    def _steps(self, about):
        """What a tile takes: K steps, and (begin, end) of each warpgroup's rank steps.

        Warpgroups of one slot share the steps over its ranks.
        """
        (first, second), ranks = about
        k_steps = jnp.int32(pl.cdiv(self.x.shape[1], STEP))
        k_steps = jnp.where((first >= 0) | (second >= 0), k_steps, 0)
        begin = jnp.where(first == second, 0, ranks[0])
        return k_steps, ((jnp.int32(0), ranks[0]), (begin, begin + ranks[1]))

    def load(self, item, about, step):
        """Fills the stages of one tile; returns the next step of the ring."""
        block, column = self._item(item)
        slots, ranks = about
        k_steps, _ = self._steps(about)
        rows, columns = pl.ds(block * ROWS, TILE_ROWS), pl.ds(column, COLUMNS)

        def fill(i, step, *, left, right, which):
            stage = self.ring.acquire(step)
            ks = pl.ds(i * STEP, STEP)
            at = (which, columns, ks) if self.transposed else (which, ks, columns)
            full = self.ring.both.at[stage]
            plgpu.copy_gmem_to_smem(left.at[rows, ks], self.ring.x.at[stage], full)
            plgpu.copy_gmem_to_smem(right.at[at], self.ring.w.at[stage], full)
            return step + 1

        base = functools.partial(fill, left=self.x, right=self.w, which=self.layer[0])
        step = lax.fori_loop(0, k_steps, base, step)
        lora = functools.partial(fill, left=self.s, right=self.b)
        steps = ranks[0], jnp.where(slots[0] == slots[1], 0, ranks[1])
        for slot, count in zip(slots, steps, strict=True):
            one = functools.partial(lora, which=slot)
            step = lax.fori_loop(0, count, one, step)
        return step

    def _skip(self, count, step):
        def one(_, step):
            self.ring.wait(step)
            self.ring.release(step)
            return step + 1

        return lax.fori_loop(0, count, one, step)

    def compute(self, item, about, step, wg):
        """Computes one tile; returns the next step of the ring."""
        block, column = self._item(item)
        slots, _ = about
        k_steps, spans = self._steps(about)
        slot, begin, end = (
            jnp.where(wg == 0, first, second)
            for first, second in zip(
                (slots[0], *spans[0]), (slots[1], *spans[1]), strict=True
            )
        )
        total = jnp.maximum(spans[0][1], spans[1][1])
        row = (block + wg) * ROWS

        def accumulate(acc):
            def multiply(_, step):
                stage = self.ring.wait(step)
                w = self.ring.w.at[stage]
                w = w.transpose((1, 0)) if self.transposed else w
                plgpu.wgmma(acc, self.ring.x_part(stage, wg), w)

            after = self.ring.each_step(k_steps, step, multiply)
            after = self._skip(begin, after)
            if self.mask is None:
                after = self.ring.each_step(end - begin, after, multiply)
            return acc[...], after

        # Read before the long product, so that nothing waits for it after.
        words = None if self.mask is None else self._words(slot, row, column)
        y, step = pl.run_scoped(accumulate, plgpu.ACC((ROWS, COLUMNS), jnp.float32))
        if words is None:
            self._store(y, slot, row, column, wg, lambda y, _: y)
        else:
            add = self._masked(words, slot, column, step, end - begin, wg)
            self._store(y, slot, row, column, wg, add)

            @pl.loop(0, end - begin)
            def _(i):
                self.ring.release(step + i)

            step = step + end - begin
        return self._skip(total - end, step)

    def _w_columns(self, stage, i):
        """The i-th 64 columns of a stage's w, as a right-hand side."""
        part = pl.ds(i * STEP, STEP)
        if self.transposed:
            return self.ring.w.at[stage, part].transpose((1, 0))
        return self.ring.w.at[stage, :, part]

    def _words(self, slot, row, column):
        """(words of the tile's tokens, of its first 64 features, threshold)."""
        mask, here = self.mask, jnp.maximum(slot, 0)
        assert mask is not None
        last = self.y.shape[0] - ROWS  # a tile's second half may lie outside
        index = mask.token_index.at[pl.ds(jnp.minimum(row, last), ROWS)]
        tokens = token_words(mask.key[here], load_line(index, OF_ROW))
        word = mask.word.at[here, pl.ds(column, STEP)]
        return tokens, load_line(word, OF_COLUMN), mask.threshold[here]

    def _masked(self, words, slot, column, step, steps, wg):
        """Adds mask * (s B) to 64 columns at a time; its stages are held meanwhile."""
        mask, here = self.mask, jnp.maximum(slot, 0)
        assert mask is not None
        tokens, first, threshold = words
        features = [first]

        @pl.loop(0, steps)
        def _(i):
            self.ring.wait(step + i)

        def add(y, i):
            if i + 1 < COLUMNS // STEP:
                word = mask.word.at[here, pl.ds(column + (i + 1) * STEP, STEP)]
                features.append(load_line(word, OF_COLUMN))

            def accumulate(acc):
                def multiply(j, _):
                    stage = self.ring.slot(step + j)
                    b = self._w_columns(stage, i)
                    plgpu.wgmma(acc, self.ring.x_part(stage, wg), b)

                lax.fori_loop(0, steps, multiply, None)
                return acc[...]

            term = pl.run_scoped(accumulate, plgpu.ACC((ROWS, STEP), jnp.float32))
            return y + dropped(term, tokens, features[i], threshold)

        return add

    def _store(self, y, slot, row, column, wg, add):
        nobody = slot < 0
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in range(COLUMNS // STEP):
            value = add(y[:, i * STEP : (i + 1) * STEP], i)

            @pl.when((column + i * STEP < self.y.shape[1]) & (row < self.y.shape[0]))
            def _(value=value, i=i):
                columns = pl.ds(column + i * STEP, STEP)
                if self.bias is not None:
                    bias = load_line(self.bias.at[columns], OF_COLUMN)
                    bias = bias.astype(jnp.float32)
                    value = value + lax.broadcast_in_dim(bias, value.shape, (1,))
                skip = lax.broadcast(nobody, value.shape)
                value = jnp.where(skip, zeros_like(value), value)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                out = self.ring.out.at[wg, i % 2]
                out[...] = value.astype(self.y.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out, self.y.at[pl.ds(row, ROWS), columns])

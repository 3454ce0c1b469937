"""The shrink kernels: `s = factor * dropout(x) A` for projections that share x.

Grid: one program per multiprocessor, and each takes items in turn. An item is a block
of 64 rows and a chunk of at most 64 ranks.
Pipeline: a ring of stages, each with 64 x 128 of x, the same 128 features of every A,
and the words of those features' masks. One warpgroup loads; two compute, each on 64 of
the 128 features, and add up at the end. x is read once for all projections.

`QuantizeShrink` also writes x as e4m3: while a stage is multiplied by A, each warpgroup
multiplies its 64 x 64 of x by the inverse scales of the rows, rounds to e4m3, and sends
the tile to device memory through one of two buffers. See docs/hopper_kernels.md.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxlora.pallas_kernels.expert_rows import SMALL_BLOCK
from jaxlora.pallas_kernels.mosaic.mask import (
    PER_ROW,
    Mask,
    MaskTiles,
    Vectors,
    apply_mask,
    load_words,
)
from jaxlora.pallas_kernels.mosaic.ring import (
    COMPUTE_WGS,
    ROWS,
    STEP,
    Ref,
    Ring,
    RingShape,
    Smem,
    half,
    max_chunks,
    stages_that_fit,
)

WIDTH = COMPUTE_WGS * STEP  # features of a stage
# A thread has four consecutive elements of a row: one word of e4m3.
_E4M3_LAYOUT = plgpu.Layout.WGMMA_8BIT


def shrink_ring(
    num_projections: int,
    width: int,
    dtype: DTypeLike,
    mask: MaskTiles | None,
    *,
    quantizes: bool = False,
    has_factors: bool = False,
) -> RingShape:
    """Returns the ring of `Shrink` for tiles of `width` ranks, and x in a dtype.

    For `QuantizeShrink`, it may also hold xq and a factor of each feature of a stage.
    """
    words = (num_projections, *(mask.shrink if mask else (WIDTH,)))
    stage_bytes = 2 * WIDTH * (ROWS + num_projections * width) + 4 * math.prod(words)
    quantized = COMPUTE_WGS, 2, ROWS, STEP
    stages = stages_that_fit(
        stage_bytes + 4 * WIDTH * has_factors,
        4 * ROWS * STEP + math.prod(quantized) * quantizes,
    )
    factors = Smem.flat(stages, WIDTH, dtype=jnp.float32)
    return RingShape.of(
        num_stages=stages,
        num_copies=1 + num_projections * (2 if mask else 1) + has_factors,
        x_smem=Smem((stages, ROWS, WIDTH), dtype),
        a_smem=Smem((stages, num_projections, width, WIDTH), dtype),
        words_smem=Smem.flat(stages, *words) if mask else None,
        outputs_smem=output_smem(width, dtype),
        quantized_smem=Smem(quantized, jnp.float8_e4m3fn) if quantizes else None,
        factors_smem=factors if has_factors else None,
    )


def output_smem(width: int, dtype: DTypeLike) -> Smem:
    """Returns the tile of s in the bytes of a sum in float32, for some ranks."""
    return Smem((ROWS, width), dtype, over=Smem((ROWS, width), jnp.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shrink:
    """Computes items of s; consecutive items have consecutive blocks of rows.

    An item reads only its own block's adapter. Each of the P projections has its own
    A, mask and result.

    Attributes:
        ring: Barriers.
        x_smem: Tiles of x, [num_stages, 64, 128].
        a_smem: Tiles of A, [num_stages, P, ranks, 128].
        words_smem: Mask words that come with a stage, or None.
        outputs_smem: The tile of s on its way to device memory, [64, ranks], and in the
            same bytes, the second warpgroup's sum, float32.
        x_gmem: [T, K].
        a_gmem: A of each projection, [G, R, K].
        s_gmem: The result of each projection, [T, R].
        slot_gmem: Slot of each block of 64 rows, [NB]; -1 for padding. If blocks are
            shared, there is an item for each block and slot, with one chunk of ranks,
            and this is the slot of each item.
        shared_gmem: The block of each item, and the slot's rows in it, both as `Shared`
            has them; None: blocks have one slot.
        settings: `KernelSettings` of each projection, with only its own rows.
        masks: Dropout masks of x for each projection; empty without dropout.
    """

    ring: Ring
    x_smem: Ref
    a_smem: Ref
    words_smem: Ref = None
    outputs_smem: Ref
    x_gmem: Ref
    a_gmem: tuple[Ref, ...]
    s_gmem: tuple[Ref, ...]
    slot_gmem: Ref
    shared_gmem: tuple[Ref, Ref] | None = None
    settings: tuple
    masks: tuple[Mask, ...]

    def _place(self, item, prefetched):
        """Returns an item's block of rows and chunk of ranks."""
        if self.shared_gmem is not None:
            return prefetched[2], 0
        return self._block_and_chunk(item)

    def _block_and_chunk(self, item):
        num_blocks = self.slot_gmem.shape[0]
        return lax.rem(item, num_blocks), lax.div(item, num_blocks)

    def prefetch(self, item):
        """Reads (slot, number of reduction steps) of an item.

        If blocks are shared, its block and rows follow. Also a slot that does not adapt
        has its s then, as expand reads it.
        """
        num_steps = pl.cdiv(self.x_gmem.shape[1], WIDTH)
        if self.shared_gmem is not None:
            slot = self.slot_gmem[item]
            num_steps = jnp.where(slot >= 0, jnp.int32(num_steps), 0)
            block, rows = (ref[item] for ref in self.shared_gmem)
            return jnp.maximum(slot, 0), num_steps, block, rows
        block, chunk = self._block_and_chunk(item)
        slot = self.slot_gmem[block]
        safe_slot = jnp.maximum(slot, 0)
        live = (slot >= 0) & self._is_needed(chunk, safe_slot)
        return safe_slot, jnp.where(live, jnp.int32(num_steps), 0)

    def _is_needed(self, chunk, slot):
        """Returns whether a slot that has rows needs a chunk of ranks."""
        return chunk < max_chunks(self.settings, slot)

    def load(self, index, item, prefetched, step):
        """Fills the stages of one item; returns the next step of the ring."""
        del index
        (block, chunk), (slot, num_steps) = (
            self._place(item, prefetched),
            prefetched[:2],
        )
        rows = pl.ds(block * ROWS, ROWS)

        def fill(i, step):
            stage = self.ring.acquire(step)
            ks = pl.ds(i * COMPUTE_WGS * STEP, WIDTH)
            full = self.ring.stage_full.at[stage]
            x_smem = self.x_smem.at[stage]
            plgpu.copy_gmem_to_smem(self.x_gmem.at[rows, ks], x_smem, full)
            self._fill_operands(stage, block, slot, chunk, ks, full)
            self._fill_more(stage, ks, full)
            return step + 1

        return lax.fori_loop(0, num_steps, fill, step)

    def _fill_operands(self, stage, block, slot, chunk, ks, full) -> None:
        """Starts the copies of A and of the masks' words for a stage's features."""
        width = self.a_smem.shape[2]
        ranks = pl.ds(chunk * width, width)
        for p, a_gmem in enumerate(self.a_gmem):
            a_smem = self.a_smem.at[stage, p]
            plgpu.copy_gmem_to_smem(a_gmem.at[slot, ranks, ks], a_smem, full)
        for p, mask in enumerate(self.masks):
            words_smem = self.words_smem.at[stage, p]
            words = mask.shrink_words(block, slot, ks)
            plgpu.copy_gmem_to_smem(words, words_smem, full)

    def _fill_more(self, stage, features, full) -> None:
        """Starts the copies of a stage that a kernel with more results needs."""

    def compute(self, item, prefetched, step, wg):
        """Computes one item; returns the next step of the ring."""
        (block, _), slot, num_steps = self._place(item, prefetched), *prefetched[:2]
        rows, width = pl.ds(block * ROWS, ROWS), self.a_smem.shape[2]
        tokens = [mask.shrink_tokens(block) for mask in self.masks]
        row_vectors = self._row_vectors(rows)

        def accumulate(*accs):
            def multiply(now):
                stage = self.ring.wait(now)
                for p, acc in enumerate(accs):
                    x = self._x(stage, wg, p, tokens, slot)
                    a_smem = self.a_smem.at[stage, p, :, pl.ds(wg * STEP, STEP)]
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
        (block, chunk), (slot, num_steps) = (
            self._place(item, prefetched),
            prefetched[:2],
        )
        width = self.a_smem.shape[2]
        at = pl.ds(block * ROWS, ROWS), pl.ds(chunk * width, width)
        for p, (s, settings) in enumerate(zip(sums, self.settings, strict=True)):

            def store(s, p=p, factor=settings.factor):
                s = s * factor[slot]
                if self.shared_gmem is None:
                    self._store(s, p, at, row_vectors)
                else:
                    self._store_rows(s, p, block, prefetched[3])

            pl.when(num_steps > 0)(
                lambda s=s, store=store: self._sum_warpgroups(s, wg, store)
            )

    def _sum_warpgroups(self, acc, wg, finish) -> None:
        """Calls `finish` in the first warpgroup with both warpgroups' acc added up."""
        sum_smem, ring = self.outputs_smem[1], self.ring

        @pl.when(wg == 0)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(ring.sum_empty)
            plgpu.barrier_wait(ring.sum_full)
            finish(acc + plgpu.load(sum_smem, layout=plgpu.Layout.WGMMA))

        @pl.when(wg == 1)
        def _():
            plgpu.barrier_wait(ring.sum_empty)
            sum_smem[...] = acc
            plgpu.barrier_arrive(ring.sum_full)

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

    def _store_rows(self, s, p, block, rows) -> None:
        """Starts the copies of the rows of s that are the slot's in a shared block."""
        out_smem, s_gmem = self.outputs_smem[0], self.s_gmem[p]
        out_smem[...] = s.astype(s_gmem.dtype)
        plgpu.commit_smem()
        for row in range(0, ROWS, SMALL_BLOCK):

            @pl.when((row >= rows >> 8) & (row < (rows & 255)))
            def _(row=row):
                to = s_gmem.at[pl.ds(block * ROWS + row, SMALL_BLOCK)]
                plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(row, SMALL_BLOCK)], to)

    def _copy_out(self, s, s_gmem) -> None:
        out_smem, _ = self.outputs_smem
        out_smem[...] = s.astype(s_gmem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, s_gmem)

    def _x(self, stage, wg, p, tokens, slot):
        """Returns dropout(x) of projection p: in registers if masked, else in smem."""
        x_smem = half(self.x_smem, stage, wg)
        if not self.masks:
            return x_smem
        x = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA)
        return self._masked(x, stage, wg, p, tokens, slot)

    def _masked(self, x, stage, wg, p, tokens, slot):
        """Returns dropout(x) of projection p for x in registers."""
        if not self.masks:
            return x
        mask, words_smem = self.masks[p], self.words_smem
        features = mask.shrink_features(words_smem, stage, p, wg)
        threshold = mask.threshold(self.settings[p], slot)
        return apply_mask(x, mask, Vectors(tokens[p], features), threshold)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeShrink(Shrink):
    """Computes items of s and, in those of the first chunk of ranks, quantizes x.

    Rows are quantized whether or not their slot adapts a projection. Rows of padding
    are not written.

    Attributes:
        quantized_smem: Tiles of xq on their way to device memory, by warpgroup and
            copy in flight, [2, 2, 64, 64]; None: x is not quantized.
        factors_smem: Factors that come with a stage, [num_stages, 128], or None.
        inverse_gmem: The inverse of each row's scale, [T], float32.
        factor_gmem: Factors of the features, [K], float32; None: they are 1.
        xq_gmem: `x * factor * inverse`, rounded to the nearest e4m3, [T, K]; None: x is
            not quantized.
        folded_gmem: `s * inverse` of each projection, [T, R], or None.
    """

    quantized_smem: Ref = None
    factors_smem: Ref = None
    inverse_gmem: Ref
    factor_gmem: Ref
    xq_gmem: Ref
    folded_gmem: tuple[Ref, ...] | None

    def _is_needed(self, chunk, slot):
        needed = super()._is_needed(chunk, slot)
        return needed if self.xq_gmem is None else needed | (chunk == 0)

    def _fill_more(self, stage, features, full) -> None:
        if self.factor_gmem is not None:
            factors_smem = self.factors_smem.at[stage]
            plgpu.copy_gmem_to_smem(self.factor_gmem.at[features], factors_smem, full)

    def _row_vectors(self, rows) -> tuple:
        """Reads the inverse scales of the rows, for tiles of x and for tiles of s."""
        inverse = self.inverse_gmem.at[rows]
        of_x = (
            None
            if self.xq_gmem is None
            else load_words(inverse, _E4M3_LAYOUT.reduce(1))
        )
        of_s = None if self.folded_gmem is None else load_words(inverse, PER_ROW)
        return of_x, of_s

    def _use_stage(self, stage, item, i, row_vectors, wg) -> None:
        if self.xq_gmem is None:
            return
        block, chunk = self._block_and_chunk(item)
        column = (i * COMPUTE_WGS + wg) * STEP

        @pl.when((chunk == 0) & (column < self.xq_gmem.shape[1]))
        def _():
            self._quantize(stage, i, (block, column), row_vectors[0], wg)

    def _quantize(self, stage, i, at, inverse, wg) -> None:
        """Quantizes a warpgroup's half of a stage."""
        block, column = at
        x_smem = half(self.x_smem, stage, wg)
        x = plgpu.load(x_smem, layout=_E4M3_LAYOUT, optimized=False).astype(jnp.float32)
        if self.factor_gmem is not None:
            own = self.factors_smem.at[stage, pl.ds(wg * STEP, STEP)]
            x = x * _spread(load_words(own, _E4M3_LAYOUT.reduce(0)), x, axis=1)
        x = x * _spread(inverse, x, axis=0)
        num_buffers = self.quantized_smem.shape[1]
        # Each item starts with the first buffer, which the last one may have used last.
        pl.when(i == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        plgpu.wait_smem_to_gmem(num_buffers - 1, wait_read_only=True)
        tile = self.quantized_smem.at[wg, lax.rem(i, jnp.int32(num_buffers))]
        tile[...] = x.astype(tile.dtype)
        plgpu.commit_smem()
        rows, columns = pl.ds(block * x.shape[0], x.shape[0]), pl.ds(column, STEP)
        plgpu.copy_smem_to_gmem(tile, self.xq_gmem.at[rows, columns])

    def _store(self, s, p, at, row_vectors) -> None:
        super()._store(s, p, at, row_vectors)
        if self.folded_gmem is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            inverse = lax.broadcast_in_dim(row_vectors[1], s.shape, (0,))
            self._copy_out(s * inverse, self.folded_gmem[p].at[at])


def _spread(vector, x, *, axis: int):
    """Broadcasts a vector along an axis of x to the shape and layout of x."""
    return plgpu.layout_cast(
        lax.broadcast_in_dim(vector, x.shape, (axis,)), _E4M3_LAYOUT
    )

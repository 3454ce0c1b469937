"""The expand kernel: `y = x W + bias + mask * (s B)`, the frozen product and LoRA's.

Grid: one program per multiprocessor, and each takes items in turn. An item is a tile of
128 x 256 of y, or of fewer columns if that makes shorter rounds. Tiles are visited in
bands of rows, so that W stays in the L2 cache.
Pipeline: a ring of four stages, each with 128 x 64 of x and 64 x 256 of W. One
warpgroup loads; two compute 64 rows each, which share one adapter, as a token block is
a multiple of 64 rows. The LoRA term is one more step for each 64 ranks, with s and B in
the place of x and W, into the same accumulator. With a mask, which applies to the LoRA
term alone, the term is added while the tile is stored, 64 columns at a time.

x and W may be float8_e4m3fn with a scale for each row of x and each column of W. A step
over K then has 128 features in the same bytes, and the tile is scaled while it is
stored. Without masks, s and B come divided by the scales, so that their term can share
the accumulator. See docs/hopper_kernels.md.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxlora.pallas_kernels.expert_rows import SMALL_BLOCK
from jaxlora.pallas_kernels.mosaic.mask import (
    PER_COLUMN,
    PER_ROW,
    Mask,
    MaskTiles,
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
    zeros_like,
)

TILE_ROWS = COMPUTE_WGS * ROWS
_STAGES = 4
_GROUPS = ROWS // SMALL_BLOCK  # of a shared block


def expand_ring(
    x_dtype: DTypeLike,
    dtype: DTypeLike,
    masks: Sequence[MaskTiles],
    *,
    transposed: bool,
    num_scales: int,
    columns: int,
    narrow_rank: int | None = None,
) -> RingShape:
    """Returns the ring of `Expand`.

    The words of masks take the bytes of the second output tile.

    Args:
        x_dtype: Dtype of x and W.
        dtype: Dtype of s, B and y. W is stored transposed if it is another one.
        masks: Shapes of the words of each mask, all of one kind.
        transposed: Whether W is stored transposed.
        num_scales: 1 if the result's rows are scaled, 2 if its columns are too.
        columns: Columns of a tile, a multiple of 64.
        narrow_rank: Ranks of a rank step, 16 or 32; None: 64, as many as features of a
            step over K. x and s have the same dtype then.
    """

    def operands(dtype: DTypeLike) -> tuple[Smem, Smem]:
        """The stages in a dtype, with 128 bytes of the reduction."""
        width = 2 * STEP // jnp.dtype(dtype).itemsize
        right = (columns, width) if transposed else (width, columns)
        left = _STAGES, TILE_ROWS, width
        return Smem(left, dtype), Smem((_STAGES, *right), dtype)

    x_smem, w_smem = operands(x_dtype)
    s_smem, b_smem = operands(dtype)
    words = (
        Smem.flat(len(masks), *(columns if n is None else n for n in shape))
        for shape in (masks[0].expand if masks else ())
    )
    lengths = (TILE_ROWS, columns)[:num_scales]
    is_same = jnp.dtype(x_dtype) == jnp.dtype(dtype)
    if narrow_rank is not None:  # the first of several tiles in a stage's bytes
        stage, is_same = (_STAGES, STEP // narrow_rank), False
        s_smem = Smem((*stage, TILE_ROWS, narrow_rank), dtype)
        b_smem = Smem((*stage, columns, narrow_rank), dtype)
    return RingShape.of(
        num_stages=_STAGES,
        num_copies=2,
        num_tile_copies=sum(one.num_expand_copies for one in masks) + num_scales,
        overlay=None if is_same else {"s_smem": s_smem, "b_smem": b_smem},
        x_smem=x_smem,
        w_smem=w_smem,
        out_smem=Smem((COMPUTE_WGS, 1 if masks else 2, ROWS, STEP), dtype),
        words_smem=tuple(words),
        scales_smem=tuple(Smem.flat(n, dtype=jnp.float32) for n in lengths),
    )


class _Step(NamedTuple):
    """The stages of both operands of a step.

    Those of narrow rank steps have several tiles, of which the first one is used.

    Attributes:
        left_smem: The rows' operand, [num_stages, 128, width].
        right_smem: The columns', [num_stages, width, columns].
        is_transposed: Whether the columns' operand is stored transposed.
    """

    left_smem: Ref
    right_smem: Ref
    is_transposed: bool

    @property
    def width(self) -> int:
        """Length of the reduction."""
        return self.left_smem.shape[-1]

    def left(self, stage) -> Ref:
        """Returns a stage's first operand."""
        return _tile(self.left_smem, stage)

    def left_rows(self, stage, wg) -> Ref:
        """Returns a warpgroup's 64 rows of a stage's first operand."""
        return self.left(stage).at[pl.ds(wg * ROWS, ROWS)]

    def right(self, stage) -> Ref:
        """Returns a stage's second operand, as it is stored."""
        return _tile(self.right_smem, stage)

    def right_columns(self, stage, i: int | None = None) -> Ref:
        """Returns the right-hand side of a stage, or of its i-th 64 columns."""
        right, part = self.right(stage), None if i is None else pl.ds(i * STEP, STEP)
        if self.is_transposed:
            right = right if part is None else right.at[part]
            return right.transpose((1, 0))
        return right if part is None else right.at[:, part]


def _tile(stages_smem: Ref, stage) -> Ref:
    is_narrow = len(stages_smem.shape) == 4
    return stages_smem.at[stage, 0] if is_narrow else stages_smem.at[stage]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expand:
    """Computes tiles of y, the sum over P projections of `x W + mask * (s B)`.

    More than one projection occurs in the backward pass, where several linears'
    gradients of a shared x are summed. The reduction over each K comes first, then the
    rank steps of the tile's adapters.

    Attributes:
        ring: Barriers.
        x_smem: Tiles of x, [num_stages, 128, width of a step].
        w_smem: Tiles of W, [num_stages, width, columns]; or [num_stages, columns,
            width] if `transposed`.
        out_smem: Tiles of y on their way to device memory, by warpgroup and copy in
            flight, [2, 1 or 2, 64, 64].
        words_smem: Words of the masks of an output tile; empty: there are none.
        scales_smem: Scales of an output tile's rows, and of its columns; empty, or of
            the rows alone.
        s_smem: Tiles of s like those of x if their dtype or width is another one, or
            None; see `_Step`.
        b_smem: Tiles of B likewise; those of another width are transposed.
        x_gmem: x of each projection, [T, K].
        w_gmem: W of each projection, [L, K, N]; [L, N, K] if `transposed`.
        layer_gmem: Index of the layer in w_gmem, [1]; or, for experts, of each tile of
            128 rows, whose blocks have the same one or are padding.
        s_gmem: s of each projection, [T, R].
        b_gmem: B of each projection, [G, R, N]; [G, N, R] if its tiles are transposed.
        y_gmem: The result, [T, N]; zero in padding rows.
        slot_gmem: Slot of each block of 64 rows, [NB]; -1 for padding.
        group_gmem: Slot of each group of 16 rows, [4 NB], if blocks are shared, or
            None. B must be finite then, as the rows of other slots multiply it by zero.
        settings: `KernelSettings` of each projection, with only its own rows.
        bias_gmem: [N], or [L, N] for experts; or None.
        scale_gmem: Scales of the sum's rows, [T], and of its columns, [N], float32;
            empty, or of the rows alone. A masked term is added after that.
        masks: Dropout masks of s B for each projection; empty without dropout.
        transposed: Whether W and B are stored transposed.
        band: Number of tile rows that are visited together.
    """

    ring: Ring
    x_smem: Ref
    w_smem: Ref
    out_smem: Ref
    words_smem: tuple[Ref, ...] = ()
    scales_smem: tuple[Ref, ...] = ()
    s_smem: Ref = None
    b_smem: Ref = None
    x_gmem: tuple[Ref, ...]
    w_gmem: tuple[Ref, ...]
    layer_gmem: Ref
    s_gmem: tuple[Ref, ...]
    b_gmem: tuple[Ref, ...]
    y_gmem: Ref
    slot_gmem: Ref
    group_gmem: Ref = None
    settings: tuple
    bias_gmem: Ref
    scale_gmem: tuple[Ref, ...]
    masks: tuple[Mask, ...]
    transposed: bool
    band: int

    @property
    def _width(self) -> int:
        """Number of columns of a tile."""
        return self.w_smem.shape[1 if self.transposed else 2]

    @property
    def _k_step(self) -> _Step:
        return _Step(self.x_smem, self.w_smem, self.transposed)

    @property
    def _rank_step(self) -> _Step:
        if self.s_smem is None:
            return self._k_step
        is_narrow = len(self.b_smem.shape) == 4
        return _Step(self.s_smem, self.b_smem, self.transposed or is_narrow)

    def _block_and_column(self, item):
        t, n = self.y_gmem.shape
        tiles = (pl.cdiv(t, TILE_ROWS), pl.cdiv(n, self._width))
        m, n = plgpu.planar_snake(item, tiles, 0, self.band)
        return m * COMPUTE_WGS, n * self._width

    def _slot(self, block):
        inside = block < self.slot_gmem.shape[0]
        slot = self.slot_gmem[jnp.where(inside, block, 0)]
        return jnp.where(inside, slot, -1)

    def prefetch(self, item):
        """Reads a tile's slots, their chunks by projection, and index of the layer.

        The slots are those of both blocks of rows. If blocks are shared, the slots of
        the tile's groups take the place of the chunks.
        """
        block, _ = self._block_and_column(item)
        slots = self._slot(block), self._slot(block + 1)
        num_chunks = ()
        if self.group_gmem is None:
            num_chunks = tuple(
                tuple(self._num_chunks(settings.num_chunks, slot) for slot in slots)
                for settings in self.settings
            )
        is_of_tile = self.layer_gmem.shape[0] > 1
        tile = lax.div(block, jnp.int32(COMPUTE_WGS)) if is_of_tile else 0
        if self.group_gmem is not None:
            first = block * _GROUPS
            groups = tuple(self.group_gmem[first + i] for i in range(2 * _GROUPS))
            return slots, groups, self.layer_gmem[tile]
        return slots, num_chunks, self.layer_gmem[tile]

    def _num_chunks(self, num_chunks, slot):
        return jnp.where(slot < 0, 0, num_chunks[jnp.maximum(slot, 0)])

    def _num_k_steps(self, p, slots):
        num_steps = pl.cdiv(self.x_gmem[p].shape[1], self.x_smem.shape[2])
        num_steps = jnp.int32(num_steps)
        return jnp.where((slots[0] >= 0) | (slots[1] >= 0), num_steps, 0)

    def _own_steps(self, num_steps, slot):
        """Returns how many steps over K a warpgroup multiplies: padding needs none."""
        return jnp.where(slot < 0, 0, num_steps)

    def _rank_steps(self, slots, num_chunks, wg):
        """Returns a warpgroup's rank steps: (before, own by projection, after).

        The first warpgroup's steps come first, then the second's. If both have the
        same slot, its steps serve both. A warpgroup skips the steps before and after
        its own.
        """
        totals = [sum(of_block) for of_block in zip(*num_chunks, strict=True)]
        before = jnp.where((wg == 0) | (slots[0] == slots[1]), 0, totals[0])
        own = [jnp.where(wg == 0, first, second) for first, second in num_chunks]
        second = jnp.where(slots[0] == slots[1], 0, totals[1])
        return before, own, totals[0] + second - before - sum(own)

    def load(self, index, item, prefetched, step):
        """Fills the stages of one tile; returns the next step of the ring."""
        block, column = self._block_and_column(item)
        slots, num_chunks, layer = prefetched
        rows, columns = pl.ds(block * ROWS, TILE_ROWS), pl.ds(column, self._width)

        def fill(i, step, *, operands, which, to: _Step):
            (left_gmem, right_gmem), stage = operands, self.ring.acquire(step)
            ks, full = pl.ds(i * to.width, to.width), self.ring.stage_full.at[stage]
            plgpu.copy_gmem_to_smem(left_gmem.at[rows, ks], to.left(stage), full)
            at = (which, columns, ks) if to.is_transposed else (which, ks, columns)
            plgpu.copy_gmem_to_smem(right_gmem.at[at], to.right(stage), full)
            return step + 1

        for p, operands in enumerate(zip(self.x_gmem, self.w_gmem, strict=True)):
            to = self._k_step
            one = functools.partial(fill, operands=operands, which=layer, to=to)
            step = lax.fori_loop(0, self._num_k_steps(p, slots), one, step)
        if self.ring.shape.num_tile_copies:
            pl.when(index > 0)(lambda: plgpu.barrier_wait(self.ring.tile_empty))
            self._load_tile_inputs(slots, block, column)
        if self.group_gmem is not None:
            return self._load_shared(prefetched, fill, step)
        for i, slot in enumerate(slots):
            shared = (i == 1) & (slots[0] == slots[1])
            for s, b, counts in zip(self.s_gmem, self.b_gmem, num_chunks, strict=True):
                to = self._rank_step
                one = functools.partial(fill, operands=(s, b), which=slot, to=to)
                step = lax.fori_loop(0, jnp.where(shared, 0, counts[i]), one, step)
        return step

    def _load_shared(self, prefetched, fill, step):
        """Fills the stages of the rank steps of a tile of shared blocks."""
        _, groups, _ = prefetched
        for operands in zip(self.s_gmem, self.b_gmem, strict=True):

            def one(_, carry, operands=operands):
                group, step = carry
                slot, _, after = _run(groups, group)
                to = self._rank_step
                return after, fill(0, step, operands=operands, which=slot, to=to)

            start = jnp.int32(0), step
            step = lax.fori_loop(0, _num_runs(groups), one, start)[1]
        return step

    def _load_tile_inputs(self, slots, block, column):
        """Fills the scales of the tile and the words of its masks."""
        columns = pl.ds(column, self._width)
        parts = pl.ds(block * ROWS, TILE_ROWS), columns
        for scale_gmem, part, scale_smem in zip(
            self.scale_gmem, parts, self.scales_smem, strict=False
        ):
            full = self.ring.tile_full
            plgpu.copy_gmem_to_smem(scale_gmem.at[part], scale_smem, full)
        words_smem, num_blocks = self.words_smem, self.slot_gmem.shape[0]
        tile = slots, block, num_blocks, columns
        for p, mask in enumerate(self.masks):
            mask.copy_expand_words(words_smem, p, *tile, self.ring.tile_full)

    def _skip(self, num_steps, step):
        def one(_, step):
            self.ring.wait(step)
            self.ring.release(step)
            return step + 1

        return lax.fori_loop(0, num_steps, one, step)

    def compute(self, item, prefetched, step, wg):
        """Computes one tile; returns the next step of the ring."""
        block, column = self._block_and_column(item)
        slots, num_chunks, layer = prefetched
        slot, row = jnp.where(wg == 0, slots[0], slots[1]), (block + wg) * ROWS
        before, own, after = 0, [], 0
        if self.group_gmem is None:
            before, own, after = self._rank_steps(slots, num_chunks, wg)

        def accumulate(acc):
            def multiply(step, *, operands: _Step):
                stage = self.ring.wait(step)
                left = operands.left_rows(stage, wg)
                plgpu.wgmma(acc, left, operands.right_columns(stage))

            end, one = step, functools.partial(multiply, operands=self._k_step)
            for p in range(len(self.x_gmem)):
                num_steps = self._num_k_steps(p, slots)
                own_steps = self._own_steps(num_steps, slot)
                end = self.ring.each_step(own_steps, end, one)
                end = self._skip(num_steps - own_steps, end)
            if self.group_gmem is not None:
                return self._multiply_shared(acc, prefetched[1], end, wg)
            end = self._skip(before, end)
            if not self.masks:
                one = functools.partial(multiply, operands=self._rank_step)
                end = self.ring.each_step(sum(own), end, one)
            return acc[...], end

        y, step = pl.run_scoped(accumulate, plgpu.ACC((ROWS, self._width), jnp.float32))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.ring.shape.num_tile_copies:
            plgpu.barrier_wait(self.ring.tile_full)
        if self.masks:
            safe_slot = jnp.maximum(slot, 0)
            each = zip(self.masks, self.settings, strict=True)
            thresholds = [mask.threshold(one, safe_slot) for mask, one in each]

            @pl.loop(0, sum(own))
            def _(i):
                self.ring.wait(step + i)

        for i in range(self._width // STEP):
            start = column + i * STEP

            @pl.when((start < self.y_gmem.shape[1]) & (row < self.y_gmem.shape[0]))
            def _(i=i, start=start):
                part = y[:, i * STEP : (i + 1) * STEP]
                part = self._scaled(part, i, wg)
                if self.masks:
                    part = self._add_masked(part, i, step, own, thresholds, wg)
                self._store(part, i, slot, layer, row, start, wg)

        if self.ring.shape.num_tile_copies:
            plgpu.barrier_arrive(self.ring.tile_empty)
        if self.masks:

            @pl.loop(0, sum(own))
            def _(i):
                self.ring.release(step + i)

            step = step + sum(own)
        return self._skip(after, step)

    def _multiply_shared(self, acc, groups, step, wg):
        """Adds the terms of the slots of a warpgroup's block; returns y and the step.

        The rank steps are those of the tile's slots in order. The rows of other slots
        are zeros in each.
        """
        own = [
            jnp.where(wg == 0, first, second)
            for first, second in zip(groups[:_GROUPS], groups[_GROUPS:], strict=True)
        ]
        num_steps, num_own = _num_runs(groups), _num_runs(own)
        before = jnp.where(wg == 0, 0, num_steps - num_own)
        for _ in self.s_gmem:
            step = self._skip(before, step)

            def multiply(now, first=step):
                stage, to = self.ring.wait(now), self._rank_step
                _, begin, after = _run(own, _start(own, now - first))
                layout = plgpu.Layout.WGMMA
                s = plgpu.load(to.left_rows(stage, wg), layout=layout, optimized=False)
                row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=layout)
                inside = (row >= begin * SMALL_BLOCK) & (row < after * SMALL_BLOCK)
                s = jnp.where(inside, s, zeros_like(s))
                plgpu.wgmma(acc, s, to.right_columns(stage))

            step = self.ring.each_step(num_own, step, multiply, num_in_flight=0)
            step = self._skip(num_steps - before - num_own, step)
        return acc[...], step

    def _scaled(self, y, i, wg):
        """Multiplies the tile's i-th 64 columns with their scales."""
        starts, layouts = (wg * ROWS, i * STEP), (PER_ROW, PER_COLUMN)
        each = zip(self.scale_gmem, starts, layouts, strict=False)
        for axis, (_, start, layout) in enumerate(each):
            scales_smem = self.scales_smem[axis].at[pl.ds(start, STEP)]
            scale = load_words(scales_smem, layout)
            y = y * lax.broadcast_in_dim(scale, y.shape, (axis,))
        return y

    def _add_masked(self, y, i, step, own, thresholds, wg):
        """Adds mask * (s B) of each projection to y, the tile's i-th 64 columns.

        The stages of all rank steps stay filled until the whole tile is stored.
        """
        mask = self.masks[0]  # all masks are of one kind

        def add(p, carry):
            y, first = carry
            num_steps = _pick(own, p)
            threshold = None if thresholds[0] is None else _pick(thresholds, p)

            def accumulate(acc):
                def multiply(j, _):
                    stage, step = self.ring.stage(first + j), self._rank_step
                    s_smem = step.left_rows(stage, wg)
                    plgpu.wgmma(acc, s_smem, step.right_columns(stage, i))

                lax.fori_loop(0, num_steps, multiply, None)
                return acc[...]

            term = pl.run_scoped(accumulate, plgpu.ACC((ROWS, STEP), jnp.float32))
            words_smem, columns = self.words_smem, pl.ds(i * STEP, STEP)
            vectors = mask.expand_vectors(words_smem, p, wg, columns)
            return y + apply_mask(term, mask, vectors, threshold), first + num_steps

        return lax.fori_loop(0, len(self.masks), add, (y, step))[0]

    def _store(self, y, i, slot, layer, row, column, wg):
        """Starts the copy of the tile's i-th 64 columns to device memory."""
        columns, num_buffers = pl.ds(column, STEP), self.out_smem.shape[1]
        if self.bias_gmem is not None:
            is_stack = len(self.bias_gmem.shape) == 2
            where = (layer, columns) if is_stack else columns
            bias = load_words(self.bias_gmem.at[where], PER_COLUMN)
            y = y + lax.broadcast_in_dim(bias.astype(jnp.float32), y.shape, (1,))
        y = jnp.where(lax.broadcast(slot < 0, y.shape), zeros_like(y), y)
        plgpu.wait_smem_to_gmem(num_buffers - 1, wait_read_only=True)
        out_smem = self.out_smem.at[wg, i % num_buffers]
        out_smem[...] = y.astype(self.y_gmem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, self.y_gmem.at[pl.ds(row, ROWS), columns])


def _num_runs(groups):
    """Returns the number of slots of consecutive groups; -1 is none."""
    before = [None, *groups]
    return sum(
        jnp.where((slot >= 0) & (True if last is None else slot != last), 1, 0)
        for last, slot in zip(before, groups, strict=False)
    )


def _start(groups, number):
    """Returns the first group of the slot with a number in their order."""
    found, runs = jnp.int32(0), jnp.int32(0)
    for i in range(1, len(groups)):
        runs = runs + jnp.where(groups[i] != groups[i - 1], 1, 0)
        is_it = (runs == number) & (groups[i] != groups[i - 1])
        found = jnp.where(is_it, i, found)
    return found


def _run(groups, first):
    """Returns the slot of a group, the group, and the group after the slot's last."""
    slot = _pick(groups, first)
    length = sum(jnp.where(one == slot, 1, 0) for one in groups)
    return slot, first, first + length


def _pick(values, index):
    """Returns values[index] of a list of scalars, for an index known at run time."""
    out = values[0]
    for i, value in enumerate(values[1:], 1):
        out = jnp.where(index == i, value, out)
    return out

"""A ring of stages in shared memory, through which a kernel's operands stream.

One warpgroup loads the stages and two compute. A stage is filled by asynchronous
copies, which report to its `stage_full` barrier. When both computing warpgroups have
read it, they report to its `stage_empty` barrier, and it is filled again. Shared memory
is scarce: the wide product takes four stages of 48 KiB, and the skinny products, which
wait for device memory, take as many stages as fit. See docs/kernels.md.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxlora.pallas_kernels.mosaic.ring_shape import ROWS, STEP, RingShape

# A reference to device memory (`*_gmem`), shared memory (`*_smem`) or barriers, or a
# view of one. Pallas has no common type for these.
Ref = Any


@dataclasses.dataclass(frozen=True)
class StepRefs:
    """The stages of the wide product as one kind of step sees them.

    Attributes:
        left: First operands, [num_stages, 128, width].
        right: Second operands, [num_stages, 256, width] if W is stored transposed, else
            [num_stages, width, 256].
        width: Length of the step's reduction.
    """

    left: Ref
    right: Ref
    width: int

    def left_rows(self, stage, wg) -> Ref:
        """Returns a warpgroup's 64 rows of a stage's first operand."""
        return self.left.at[stage, pl.ds(wg * ROWS, ROWS)]


@dataclasses.dataclass(frozen=True)
class Ring:
    """References to one kernel's shared memory and barriers.

    Attributes:
        shape: Its contents.
        x_smem: First operands, [num_stages, *x_tile].
        w_smem: Second operands, [num_stages, *w_tile].
        stage_words_smem: Mask words, [num_stages, *stage_words], uint32, or None.
        outputs_smem: Pair of `out_smem` and `sum_smem`, which share their bytes.
        tile_words_smem: Words of an output tile's masks, of the shapes `tile_words`,
            uint32, or None.
        tile_scales_smem: Scales of an output tile's rows, and of its columns, of the
            lengths `tile_scales`, float32, or None.
        quantized_smem: E4m3 tiles on their way to device memory, `quantized_tile`, or
            None.
        factors_smem: Factors of features, [num_stages, num_factors], or None.
        result_smem: Results of a row-wise function on their way to device memory,
            `result_tile`, or None.
        rank_tiles_smem: The operands of the rank steps if their dtype is another, in
            the bytes of x_smem and w_smem, or None.
        stage_full: One barrier for each stage; its copies have landed.
        stage_empty: One barrier for each stage; both warpgroups have read it.
        sum_empty: Barrier; `sum_smem` may be overwritten.
        sum_full: Barrier; `sum_smem` holds the second warpgroup's sum.
        words_full: Barrier; the words and scales of the output tile have landed.
        words_empty: Barrier; both warpgroups have read the words and scales.
    """

    shape: RingShape
    x_smem: Ref
    w_smem: Ref
    stage_words_smem: Ref
    outputs_smem: Ref
    tile_words_smem: Ref
    tile_scales_smem: Ref
    quantized_smem: Ref
    factors_smem: Ref
    result_smem: Ref
    rank_tiles_smem: Sequence[Ref] | None
    stage_full: Ref
    stage_empty: Ref
    sum_empty: Ref
    sum_full: Ref
    words_full: Ref
    words_empty: Ref

    @property
    def k_step(self) -> StepRefs:
        """Operands of the wide product's steps over K."""
        return StepRefs(self.x_smem, self.w_smem, self.shape.k_step)

    @property
    def rank_step(self) -> StepRefs:
        """Operands of the wide product's rank steps."""
        left, right = self.rank_tiles_smem or (self.x_smem, self.w_smem)
        return StepRefs(left, right, STEP)

    @property
    def out_smem(self) -> Ref:
        """Output tiles on their way to device memory."""
        return self.outputs_smem[0]

    @property
    def sum_smem(self) -> Ref:
        """Float32 tiles: sums on their way to device memory or to a warpgroup."""
        return self.outputs_smem[1]

    def stage(self, step):
        """Returns the stage that a step uses."""
        return lax.rem(step, jnp.int32(self.shape.num_stages))

    def x_half(self, stage, i) -> Ref:
        """Returns the i-th half of a stage's x, 64 rows of 64 features."""
        return self.x_smem.at[stage, :, pl.ds(i * STEP, STEP)]

    def acquire(self, step):
        """Returns the stage of a step once it may be filled. For the loader."""
        stage = self.stage(step)
        pl.when(step >= self.shape.num_stages)(
            lambda: plgpu.barrier_wait(self.stage_empty.at[stage])
        )
        return stage

    def wait(self, step):
        """Returns the stage of a step once it is filled."""
        stage = self.stage(step)
        plgpu.barrier_wait(self.stage_full.at[stage])
        return stage

    def release(self, step):
        """Reports that this warpgroup no longer reads the stage of a step."""
        plgpu.barrier_arrive(self.stage_empty.at[self.stage(step)])

    def each_step(self, num_steps, step, multiply, num_in_flight=1):
        """Calls `multiply(step)` for each step and releases each stage once it is read.

        Args:
            num_steps: Number of steps.
            step: The first step.
            multiply: Starts the products of a step.
            num_in_flight: Products that may still run when the next step starts. All of
                a step's products, so that they overlap with what the next step does
                before its own; or 0 if their operands are in registers.

        Returns:
            The step after the last one.
        """

        def one(i, step):
            multiply(step)
            plgpu.wgmma_wait(num_in_flight)
            if num_in_flight:
                pl.when(i > 0)(lambda: self.release(step - 1))
            else:
                self.release(step)
            return step + 1

        step = lax.fori_loop(0, num_steps, one, step)
        if num_in_flight:
            plgpu.wgmma_wait(0)
            pl.when(num_steps > 0)(lambda: self.release(step - 1))
        return step

    def drain(self, num_steps, num_items):
        """Waits until everything is read: a kernel must not end before its barriers."""
        if self.shape.has_tile_inputs:
            pl.when(num_items > 0)(lambda: plgpu.barrier_wait(self.words_empty))
        for stage in range(self.shape.num_stages):
            wait = functools.partial(plgpu.barrier_wait, self.stage_empty.at[stage])
            pl.when(num_steps > stage)(wait)

    def sum_warpgroups(self, acc, wg, finish) -> None:
        """Calls `finish` in the first warpgroup with both warpgroups' acc added up."""

        @pl.when(wg == 0)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.sum_empty)
            plgpu.barrier_wait(self.sum_full)
            finish(acc + plgpu.load(self.sum_smem, layout=plgpu.Layout.WGMMA))

        @pl.when(wg == 1)
        def _():
            plgpu.barrier_wait(self.sum_empty)
            self.sum_smem[...] = acc
            plgpu.barrier_arrive(self.sum_full)


def max_chunks(settings, slot):
    """Returns the largest number of rank chunks that a slot has in any projection."""
    return functools.reduce(jnp.maximum, [one.num_chunks[slot] for one in settings])


def zeros_like(x: jax.Array) -> jax.Array:
    """Returns zeros in a layout that fits x."""
    return jnp.zeros(x.shape, x.dtype)

"""The shared-memory ring that every kind of work of a kernel streams through.

One warpgroup loads, two compute. A stage holds a tile of x, 128 x 64, and a tile of w,
64 x 256 (or 256 x 64). The wide product uses both whole; the skinny products use the
same bytes as 64 x 64 parts, two of x and four of w. So one kernel can do both kinds of
work without a second set of buffers, of which shared memory has no room.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # token rows of one warpgroup: what one wgmma takes
STEP = 64  # reduction step: 128 bytes of bf16, the widest swizzled row
COLUMNS = 256  # columns of a tile of the wide product: four parts
STAGES = 4
COMPUTE = 2  # warpgroups that compute
SWIZZLE = plgpu.SwizzleTransform(128)
HALF_TILES = (plgpu.TilingTransform((8, 64)), SWIZZLE)
FLOAT_TILES = (plgpu.TilingTransform((8, 32)), SWIZZLE)


@dataclasses.dataclass(frozen=True)
class Ring:
    """References of one kernel's shared memory.

    Attributes:
        x, w: The stages.
        parts: The stages' w by quarters; same bytes as w.
        lines: 64 words beside each stage's halves of x, for dropout masks.
        out: Staging of output tiles on their way to device memory, by warpgroup.
        sum: Where the second warpgroup hands its sums to the first; same bytes as out.
        both: Stage filled, for work that both warpgroups share.
        own: Stage filled, by warpgroup.
        empty: Stage free again.
        free, summed: Hand-over of `sum`.
        transposed: Whether a stage's w is 256 x 64.
    """

    x: Any
    w: Any
    parts: Any
    lines: Any
    out: Any
    sum: Any
    both: Any
    own: Any
    empty: Any
    free: Any
    summed: Any
    transposed: bool

    @staticmethod
    def scratch(dtype, *, transposed: bool, masked: bool) -> list:
        """Scratch types, in the order of the attributes."""
        w_tile = (COLUMNS, STEP) if transposed else (STEP, COLUMNS)
        return [
            plgpu.SMEM((STAGES, COMPUTE * ROWS, STEP), dtype, transforms=HALF_TILES),
            plgpu.RefUnion(
                plgpu.SMEM((STAGES, *w_tile), dtype, transforms=HALF_TILES),
                plgpu.SMEM((STAGES, 4, STEP, STEP), dtype, transforms=HALF_TILES),
            ),
            plgpu.SMEM((STAGES, COMPUTE, STEP), jnp.uint32),
            plgpu.RefUnion(
                plgpu.SMEM((COMPUTE, 2, ROWS, STEP), dtype, transforms=HALF_TILES),
                plgpu.SMEM((ROWS, STEP), jnp.float32, transforms=FLOAT_TILES),
            ),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2 + masked, num_barriers=(COMPUTE, STAGES)),
            plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=STAGES),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ]

    def x_part(self, slot, i):
        """The i-th half of a stage's x, 64 x 64."""
        return self.x.at[slot, pl.ds(i * ROWS, ROWS)]

    def w_part(self, slot, i):
        """The i-th quarter of a stage's w, 64 x 64, for skinny products."""
        return self.parts.at[slot, i]

    def w_columns(self, slot, i):
        """The i-th 64 columns of a stage's w, as a wide product loaded it."""
        part = pl.ds(i * STEP, STEP)
        if self.transposed:
            return self.w.at[slot, part].transpose((1, 0))
        return self.w.at[slot, :, part]

    def acquire(self, step):
        """The stage of a step, once its last readers are done. For the loader."""
        slot = lax.rem(step, jnp.int32(STAGES))
        pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(self.empty.at[slot]))
        return slot

    def wait(self, step):
        """The stage of a step, once it is filled for both warpgroups."""
        slot = lax.rem(step, jnp.int32(STAGES))
        plgpu.barrier_wait(self.both.at[slot])
        return slot

    def wait_own(self, step, warpgroup):
        """The stage of a step, once it is filled for one warpgroup."""
        slot = lax.rem(step, jnp.int32(STAGES))
        plgpu.barrier_wait(self.own.at[warpgroup, slot])
        return slot

    def release(self, step):
        """This warpgroup no longer reads the stage."""
        plgpu.barrier_arrive(self.empty.at[lax.rem(step, jnp.int32(STAGES))])

    def each_step(self, count, step, multiply):
        """Calls `multiply(i, step)` and releases each stage one step later.

        So the products of a step overlap with what `multiply` does before its own.
        """

        def one(i, step):
            multiply(i, step)
            plgpu.wgmma_wait(1)
            pl.when(i > 0)(lambda: self.release(step - 1))
            return step + 1

        step = lax.fori_loop(0, count, one, step)
        plgpu.wgmma_wait(0)
        pl.when(count > 0)(lambda: self.release(step - 1))
        return step

    def drain(self, steps):
        """Waits until every stage was read: no barrier may be left behind."""
        for slot in range(STAGES):
            wait = functools.partial(plgpu.barrier_wait, self.empty.at[slot])
            pl.when(steps > slot)(wait)

    def add_up(self, acc, warpgroup, finish) -> None:
        """Calls `finish` in the first warpgroup with the sum over both of `acc`."""

        @pl.when(warpgroup == 0)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.free)
            plgpu.barrier_wait(self.summed)
            finish(acc + plgpu.load(self.sum, layout=plgpu.Layout.WGMMA))

        @pl.when(warpgroup == 1)
        def _():
            plgpu.barrier_wait(self.free)
            self.sum[...] = acc
            plgpu.barrier_arrive(self.summed)


def zeros_like(x: jax.Array) -> jax.Array:
    """Zeros in a layout that fits x."""
    return jnp.zeros(x.shape, x.dtype)

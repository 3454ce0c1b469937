"""The ring in shared memory through which a kernel's operands stream.

One warpgroup loads, two compute, each on 64 rows or columns of its own. Shared memory
is the scarce thing: a wide product takes four stages of 48 KiB, and a skinny one, which
waits for device memory, as many stages as fit.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # token rows of one warpgroup: what one wgmma takes
STEP = 64  # reduction step: 128 bytes of bf16, the widest swizzled row
COLUMNS = 256  # columns of a tile of the wide product
COMPUTE = 2  # warpgroups that compute
_SHARED_BYTES = 227 * 1024


def _tiles(columns: int, dtype) -> tuple:
    """How a tile lies in shared memory: swizzled by as much as its rows allow."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = math.gcd(columns * itemsize, 128)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return tiling, plgpu.SwizzleTransform(swizzle)


def _smem(shape: tuple[int, ...], dtype):
    return plgpu.SMEM(shape, dtype, transforms=_tiles(shape[-1], dtype))


def _stages_that_fit(stage_bytes: int, spares: int, leaving_bytes: int) -> int:
    room = _SHARED_BYTES - leaving_bytes - 2 * COMPUTE * 2 * spares * ROWS * STEP
    return (room - 2048) // stage_bytes


@dataclasses.dataclass(frozen=True)
class RingShape:
    """What a kernel's shared memory holds.

    Attributes:
        stages: How many.
        w_tile: Shape of a stage's second operand; its first is 128 x 64.
        lines: Lines of 64 words that come with a stage, for masks.
        spares: Masked copies of x that each warpgroup makes beside the one in place.
        copies: What fills a stage for both warpgroups, in copies.
        own_copies: What fills a stage for one warpgroup.
        out_tile: Shape of the tiles that leave, and how many are on their way.
        sum_tiles: Tiles of float32 in the place of those that leave.
    """

    stages: int
    w_tile: tuple[int, ...]
    lines: tuple[int, ...]
    spares: int
    copies: int
    own_copies: int
    out_tile: tuple[int, ...]
    sum_tiles: int

    @staticmethod
    def wide(*, transposed: bool) -> "RingShape":
        """For a product with W, whose tile is 64 x 256, or 256 x 64 when transposed."""
        w_tile = (COLUMNS, STEP) if transposed else (STEP, COLUMNS)
        return RingShape(
            stages=4,
            w_tile=w_tile,
            lines=(1,),
            spares=0,
            copies=2,
            own_copies=1,
            out_tile=(COMPUTE, 2, ROWS, STEP),
            sum_tiles=1,
        )

    @staticmethod
    def shrink(parts: int, width: int, *, masked: bool) -> "RingShape":
        """For x A of several parts: each warpgroup reduces over its own features."""
        spares = parts - 1 if masked else 0
        lines = (COMPUTE, parts)
        stage = 2 * COMPUTE * (ROWS + parts * width) * STEP + 4 * STEP * math.prod(
            lines
        )
        return RingShape(
            stages=_stages_that_fit(stage, spares, 4 * ROWS * STEP),
            w_tile=(COMPUTE, parts, width, STEP),
            lines=lines if masked else (1,),
            spares=spares,
            copies=1,
            own_copies=1 + parts * (1 + masked),
            out_tile=(1, 1, ROWS, width),
            sum_tiles=1,
        )

    @staticmethod
    def outer(parts: int, *, masked: bool) -> "RingShape":
        """For wide^T narrow of several parts: each warpgroup has its own features."""
        spares = parts - 1 if masked else 0
        stage = 2 * (COMPUTE + parts) * ROWS * STEP + 4 * STEP
        return RingShape(
            stages=_stages_that_fit(stage, spares, 4 * COMPUTE * ROWS * STEP),
            w_tile=(parts, ROWS, STEP),
            lines=(1,),
            spares=spares,
            copies=COMPUTE + parts + masked,
            own_copies=1,
            out_tile=(1, 1, ROWS, STEP),
            sum_tiles=COMPUTE,
        )

    def scratch(self, dtype) -> list:
        """Scratch types, in the order of the attributes of `Ring`."""
        return [
            _smem((self.stages, COMPUTE * ROWS, STEP), dtype),
            _smem((self.stages, *self.w_tile), dtype),
            plgpu.SMEM((self.stages, *self.lines, STEP), jnp.uint32),
            _smem((2, COMPUTE, self.spares, ROWS, STEP), dtype)
            if self.spares
            else plgpu.SMEM((1,), jnp.uint32),
            plgpu.RefUnion(
                _smem(self.out_tile, dtype),
                _smem((self.sum_tiles, *self.out_tile[-2:]), jnp.float32),
            ),
            plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.stages),
            plgpu.Barrier(
                num_arrivals=self.own_copies, num_barriers=(COMPUTE, self.stages)
            ),
            plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=self.stages),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ]


@dataclasses.dataclass(frozen=True)
class Ring:
    """References of one kernel's shared memory.

    Attributes:
        shape: What it holds.
        x, w: The stages.
        lines: Lines of 64 words beside each stage, for dropout masks.
        spare: Masked copies of x: of even and odd steps, by warpgroup.
        out: Staging of output tiles on their way to device memory, by warpgroup.
        sum: Float32 tiles in the same bytes: sums that leave, or that one warpgroup
            hands to the other.
        both: Stage filled, for work that both warpgroups share.
        own: Stage filled, by warpgroup.
        empty: Stage free again.
        free, summed: Hand-over of `sum`.
    """

    shape: RingShape
    x: Any
    w: Any
    lines: Any
    spare: Any
    out: Any
    sum: Any
    both: Any
    own: Any
    empty: Any
    free: Any
    summed: Any

    def slot(self, step):
        """The stage of a step."""
        return lax.rem(step, jnp.int32(self.shape.stages))

    def x_part(self, slot, i):
        """The i-th half of a stage's x, 64 x 64."""
        return self.x.at[slot, pl.ds(i * ROWS, ROWS)]

    def spare_tile(self, i, warpgroup, index):
        """Where a warpgroup keeps a copy of the i-th step's x."""
        return self.spare.at[lax.rem(i, 2), warpgroup, index]

    def acquire(self, step):
        """The stage of a step, once its last readers are done. For the loader."""
        slot = self.slot(step)
        pl.when(step >= self.shape.stages)(
            lambda: plgpu.barrier_wait(self.empty.at[slot])
        )
        return slot

    def wait(self, step):
        """The stage of a step, once it is filled for both warpgroups."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.both.at[slot])
        return slot

    def wait_own(self, step, warpgroup):
        """The stage of a step, once it is filled for one warpgroup."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.own.at[warpgroup, slot])
        return slot

    def release(self, step):
        """This warpgroup no longer reads the stage."""
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def each_step(self, count, step, multiply, products=1):
        """Calls `multiply(i, step)` and releases each stage one step later.

        So the products of a step, as many as `products`, overlap with what `multiply`
        does before its own.
        """

        def one(i, step):
            multiply(i, step)
            plgpu.wgmma_wait(products)
            pl.when(i > 0)(lambda: self.release(step - 1))
            return step + 1

        step = lax.fori_loop(0, count, one, step)
        plgpu.wgmma_wait(0)
        pl.when(count > 0)(lambda: self.release(step - 1))
        return step

    def drain(self, steps):
        """Waits until every stage was read: no barrier may be left behind."""
        for slot in range(self.shape.stages):
            wait = functools.partial(plgpu.barrier_wait, self.empty.at[slot])
            pl.when(steps > slot)(wait)

    def add_up(self, acc, warpgroup, finish) -> None:
        """Calls `finish` in the first warpgroup with the sum over both of `acc`."""

        @pl.when(warpgroup == 0)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.free)
            plgpu.barrier_wait(self.summed)
            finish(acc + plgpu.load(self.sum.at[0], layout=plgpu.Layout.WGMMA))

        @pl.when(warpgroup == 1)
        def _():
            plgpu.barrier_wait(self.free)
            self.sum[0] = acc
            plgpu.barrier_arrive(self.summed)


def most_chunks(chunks, slot):
    """The chunks of ranks that a slot fills in any projection."""
    return functools.reduce(jnp.maximum, [of_slots[slot] for of_slots in chunks])


def zeros_like(x: jax.Array) -> jax.Array:
    """Zeros in a layout that fits x."""
    return jnp.zeros(x.shape, x.dtype)

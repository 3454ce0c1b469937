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


def _bytes_of(words: tuple[int, ...]) -> int:
    return 4 * math.prod(words)


def _stages_that_fit(stage_bytes: int, leaving_bytes: int) -> int:
    return (_SHARED_BYTES - leaving_bytes - 2048) // stage_bytes


@dataclasses.dataclass(frozen=True)
class RingShape:
    """The contents of a kernel's shared memory.

    Attributes:
        stages: How many.
        x_tile: Shape of a stage's first operand, of which each warpgroup has a half.
        w_tile: Shape of its second operand.
        lines: Shape of the words that come with a stage, for masks.
        copies: What fills a stage, in copies: their number costs the loader most.
        out_tile: Shape of the tiles that leave, with how many are on their way.
        sum_tile: Shape of tiles of float32, in the same place.
        words: Masks whose words, of a whole tile, come beside the stages.
    """

    stages: int
    x_tile: tuple[int, ...]
    w_tile: tuple[int, ...]
    lines: tuple[int, ...] | None
    copies: int
    out_tile: tuple[int, ...] | None = None
    sum_tile: tuple[int, ...] | None = None
    words: int = 0

    @staticmethod
    def wide(*, transposed: bool, masks: int) -> "RingShape":
        """For a product with W, whose tile is 64 x 256, or 256 x 64 when transposed.

        The words of masks take the place of the second of the tiles that leave.
        """
        w_tile = (COLUMNS, STEP) if transposed else (STEP, COLUMNS)
        return RingShape(
            stages=4,
            x_tile=(COMPUTE * ROWS, STEP),
            w_tile=w_tile,
            lines=None,
            copies=2,
            out_tile=(COMPUTE, 1 if masks else 2, ROWS, STEP),
            words=masks,
        )

    @staticmethod
    def shrink(parts: int, width: int, *, masked: bool) -> "RingShape":
        """For x A of several parts: each warpgroup reduces over its own features."""
        lines = (parts, COMPUTE * STEP)
        stage = 2 * COMPUTE * (ROWS + parts * width) * STEP
        return RingShape(
            stages=_stages_that_fit(stage + _bytes_of(lines), 4 * ROWS * STEP),
            x_tile=(ROWS, COMPUTE * STEP),
            w_tile=(parts, width, COMPUTE * STEP),
            lines=lines if masked else None,
            copies=1 + parts * (1 + masked),
            out_tile=(ROWS, width),
            sum_tile=(ROWS, width),
        )

    @staticmethod
    def outer(parts: int, *, masked: bool) -> "RingShape":
        """For wide^T narrow of several parts: each warpgroup has its own features."""
        lines = (parts, 2, ROWS)
        stage = 2 * (COMPUTE + parts) * ROWS * STEP
        return RingShape(
            stages=_stages_that_fit(
                stage + _bytes_of(lines), 4 * COMPUTE * ROWS * STEP
            ),
            x_tile=(ROWS, COMPUTE * STEP),
            w_tile=(parts, ROWS, STEP),
            lines=lines if masked else None,
            copies=1 + parts * (1 + masked),
            sum_tile=(COMPUTE, ROWS, STEP),
        )

    def tiles(self, dtype) -> list:
        """Scratch types of the stages and of what leaves, in `Ring`'s order."""
        out = sums = None
        if self.out_tile is not None:
            out = _smem(self.out_tile, dtype)
        if self.sum_tile is not None:
            sums = _smem(self.sum_tile, jnp.float32)
        both = out is not None and sums is not None
        return [
            _smem((self.stages, *self.x_tile), dtype),
            _smem((self.stages, *self.w_tile), dtype),
            None
            if self.lines is None
            else plgpu.SMEM((self.stages, *self.lines), jnp.uint32),
            plgpu.RefUnion(out, sums) if both else (out, sums),
            [
                plgpu.SMEM((self.words, COMPUTE, COLUMNS), jnp.uint32),
                plgpu.SMEM((self.words, COMPUTE, 2, ROWS), jnp.uint32),
            ]
            if self.words
            else None,
        ]

    def barriers(self) -> list:
        """Scratch types of the barriers, in `Ring`'s order."""
        return [
            plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.stages),
            plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=self.stages),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=max(2 * COMPUTE * self.words, 1)),
            plgpu.Barrier(num_arrivals=COMPUTE),
        ]


@dataclasses.dataclass(frozen=True)
class Ring:
    """References of one kernel's shared memory.

    Attributes:
        shape: What it holds.
        x, w: The stages.
        lines: Lines of 64 words beside each stage, for dropout masks.
        leaving: (`out`, `sum`).
        words: (words of a tile's features, of its tokens), by mask and warpgroup.
        full: Stage filled.
        empty: Stage free again.
        free, summed: Hand-over of `sum`.
        told, heard: Words of a tile's masks are there, or no longer read.
    """

    shape: RingShape
    x: Any
    w: Any
    lines: Any
    leaving: Any
    words: Any
    full: Any
    empty: Any
    free: Any
    summed: Any
    told: Any
    heard: Any

    @property
    def out(self):
        """Staging of output tiles on their way to device memory."""
        return self.leaving[0]

    @property
    def sum(self):
        """Float32 tiles in the same bytes: sums that leave or are handed over."""
        return self.leaving[1]

    def slot(self, step):
        """The stage of a step."""
        return lax.rem(step, jnp.int32(self.shape.stages))

    def x_part(self, slot, i):
        """The i-th half of a stage's x, 64 x 64."""
        part = pl.ds(i * STEP, STEP)
        if self.shape.x_tile[0] == ROWS:
            return self.x.at[slot, :, part]
        return self.x.at[slot, part]

    def acquire(self, step):
        """The stage of a step, once its last readers are done. For the loader."""
        slot = self.slot(step)
        pl.when(step >= self.shape.stages)(
            lambda: plgpu.barrier_wait(self.empty.at[slot])
        )
        return slot

    def wait(self, step):
        """The stage of a step, once it is filled."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.full.at[slot])
        return slot

    def release(self, step):
        """This warpgroup no longer reads the stage."""
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def each_step(self, count, step, multiply, ahead=1):
        """Calls `multiply(step)` and releases each stage when it was read.

        Args:
            count: How many steps.
            step: The first.
            multiply: Starts the step's products.
            ahead: How many products may still run when the next step starts: all of a
                step's, so that they overlap with what the next one does before its own,
                or 0 if their operands are in registers.
        """

        def one(i, step):
            multiply(step)
            plgpu.wgmma_wait(ahead)
            if ahead:
                pl.when(i > 0)(lambda: self.release(step - 1))
            else:
                self.release(step)
            return step + 1

        step = lax.fori_loop(0, count, one, step)
        if ahead:
            plgpu.wgmma_wait(0)
            pl.when(count > 0)(lambda: self.release(step - 1))
        return step

    def drain(self, steps, items):
        """Waits until everything was read: no barrier may be left behind."""
        if self.shape.words:
            pl.when(items > 0)(lambda: plgpu.barrier_wait(self.heard))
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
            finish(acc + plgpu.load(self.sum, layout=plgpu.Layout.WGMMA))

        @pl.when(warpgroup == 1)
        def _():
            plgpu.barrier_wait(self.free)
            self.sum[...] = acc
            plgpu.barrier_arrive(self.summed)


def most_chunks(settings, slot):
    """The chunks of ranks that a slot fills in any projection."""
    return functools.reduce(jnp.maximum, [one.chunks[slot] for one in settings])


def zeros_like(x: jax.Array) -> jax.Array:
    """Zeros in a layout that fits x."""
    return jnp.zeros(x.shape, x.dtype)

"""A ring of stages in shared memory, through which a kernel's operands stream.

One warpgroup loads the stages and two compute. A stage is filled by asynchronous
copies, which report to its `stage_full` barrier. When both computing warpgroups have
read it, they report to its `stage_empty` barrier, and it is filled again. Shared memory
is scarce: the wide product takes four stages of 48 KiB, and the skinny products, which
wait for device memory, take as many stages as fit. See docs/hopper_kernels.md.
"""

import dataclasses
import functools
import math
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

ROWS = 64  # token rows of one warpgroup: the M of one wgmma
STEP = 64  # reduction step: 128 bytes of bf16, the widest swizzle
COLUMNS = 256  # the most columns of a tile of the wide product
COMPUTE_WGS = 2  # warpgroups that compute
_SHARED_BYTES = 227 * 1024

# A reference to device memory (`*_gmem`), shared memory (`*_smem`) or barriers, or a
# view of one. Pallas has no common type for these.
Ref = Any


@dataclasses.dataclass(frozen=True)
class Smem:
    """An array in shared memory.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        is_tiled: Whether it is laid out in tiles, as tensor cores read and write it.
        over: Another array in the same bytes; a role has the pair of them.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    is_tiled: bool = True
    over: "Smem | None" = None

    @classmethod
    def flat(cls, *shape: int, dtype: DTypeLike = jnp.uint32) -> "Smem":
        """Makes an array that is not tiled, by default of mask words."""
        return cls(shape, dtype, is_tiled=False)

    def ref_type(self) -> Any:
        """Returns its scratch type; tiles get the widest swizzle that fits."""
        transforms = ()
        if self.is_tiled:
            itemsize = jnp.dtype(self.dtype).itemsize
            swizzle = math.gcd(self.shape[-1] * itemsize, 128)
            tiling = plgpu.TilingTransform((8, swizzle // itemsize))
            transforms = tiling, plgpu.SwizzleTransform(swizzle)
        own = plgpu.SMEM(self.shape, self.dtype, transforms=transforms)
        return plgpu.RefUnion(own, self.over.ref_type()) if self.over else own


@dataclasses.dataclass(frozen=True)
class RingShape:
    """The shared memory and the barriers of a work.

    Attributes:
        num_stages: Number of stages.
        num_copies: Copies that fill a stage. The loader's time goes by their number.
        num_tile_copies: Copies that fill what comes with an output tile, such as mask
            words; 0: nothing does.
        smem: Arrays, or tuples of them, by the names that the role has for them.
        overlay: Such arrays in the bytes of the first ones.
    """

    num_stages: int
    num_copies: int
    num_tile_copies: int
    smem: tuple[tuple[str, Any], ...]
    overlay: tuple[tuple[str, Any], ...]

    @classmethod
    def of(
        cls,
        num_stages: int,
        num_copies: int,
        num_tile_copies: int = 0,
        overlay: dict[str, Smem] | None = None,
        **smem: Any,
    ) -> "RingShape":
        """Returns the ring of arrays in this order; the role lacks those of None."""
        found = tuple((name, one) for name, one in smem.items() if one)
        over = tuple((overlay or {}).items())
        return cls(num_stages, num_copies, num_tile_copies, found, over)

    def groups(self) -> list[dict[str, Any]]:
        """Returns the scratch types by name; the groups share their bytes.

        JAX would sort the names of a plain `dict`, and with them shared memory.
        """
        given = [self.smem, self.overlay] if self.overlay else [self.smem]
        return [
            OrderedDict((name, jax.tree.map(Smem.ref_type, one)) for name, one in group)
            for group in given
        ]

    def barriers(self) -> dict[str, Any]:
        """Returns the scratch types of the barriers of `Ring`, by name."""
        full = plgpu.Barrier(num_arrivals=self.num_copies, num_barriers=self.num_stages)
        empty = plgpu.Barrier(num_arrivals=COMPUTE_WGS, num_barriers=self.num_stages)
        return OrderedDict(
            stage_full=full,
            stage_empty=empty,
            sum_empty=plgpu.Barrier(),
            sum_full=plgpu.Barrier(),
            tile_full=plgpu.Barrier(num_arrivals=max(self.num_tile_copies, 1)),
            tile_empty=plgpu.Barrier(num_arrivals=COMPUTE_WGS),
        )


def stages_that_fit(stage_bytes: int, other_bytes: int) -> int:
    """Returns how many stages fit into shared memory beside other arrays."""
    return (_SHARED_BYTES - other_bytes - 2048) // stage_bytes


@dataclasses.dataclass(frozen=True)
class Ring:
    """References to a work's barriers.

    Attributes:
        shape: What they are for.
        stage_full: One barrier for each stage; its copies have landed.
        stage_empty: One barrier for each stage; both warpgroups have read it.
        sum_empty: Barrier; the second warpgroup may write its sum.
        sum_full: Barrier; it has done so.
        tile_full: Barrier; what comes with the output tile has landed.
        tile_empty: Barrier; both warpgroups have read it.
    """

    shape: RingShape
    stage_full: Ref
    stage_empty: Ref
    sum_empty: Ref
    sum_full: Ref
    tile_full: Ref
    tile_empty: Ref

    def stage(self, step):
        """Returns the stage that a step uses."""
        return lax.rem(step, jnp.int32(self.shape.num_stages))

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
        if self.shape.num_tile_copies:
            pl.when(num_items > 0)(lambda: plgpu.barrier_wait(self.tile_empty))
        for stage in range(self.shape.num_stages):
            wait = functools.partial(plgpu.barrier_wait, self.stage_empty.at[stage])
            pl.when(num_steps > stage)(wait)


def half(tiles_smem: Ref, stage, wg) -> Ref:
    """Returns a warpgroup's half of a stage's tile: 64 rows of 64 features."""
    return tiles_smem.at[stage, :, pl.ds(wg * STEP, STEP)]


def max_chunks(settings, slot):
    """Returns the largest number of rank chunks that a slot has in any projection."""
    return functools.reduce(jnp.maximum, [one.num_chunks[slot] for one in settings])


def zeros_like(x: jax.Array) -> jax.Array:
    """Returns zeros in a layout that fits x."""
    return jnp.zeros(x.shape, x.dtype)

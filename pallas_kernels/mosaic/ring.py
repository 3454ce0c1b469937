"""A ring of stages in shared memory, through which a kernel's operands stream.

One warpgroup loads the stages and two compute. A stage is filled by asynchronous
copies, which report to its `stage_full` barrier. When both computing warpgroups have
read it, they report to its `stage_empty` barrier, and it is filled again. Shared memory
is scarce: the wide product takes four stages of 48 KiB, and the skinny products, which
wait for device memory, take as many stages as fit. See docs/kernels.md.
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

ROWS = 64  # token rows of one warpgroup: the M of one wgmma
STEP = 64  # reduction step: 128 bytes of bf16, the widest swizzle
COLUMNS = 256  # columns of a tile of the wide product
COMPUTE_WGS = 2  # warpgroups that compute
_SHARED_BYTES = 227 * 1024

# A reference to device memory (`*_gmem`), shared memory (`*_smem`) or barriers, or a
# view of one. Pallas has no common type for these.
Ref = Any


def _transforms(num_columns: int, dtype) -> tuple:
    """Returns a tile's layout in shared memory, with the widest swizzle that fits."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = math.gcd(num_columns * itemsize, 128)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return tiling, plgpu.SwizzleTransform(swizzle)


def _tiled_smem(shape: tuple[int, ...], dtype):
    return plgpu.SMEM(shape, dtype, transforms=_transforms(shape[-1], dtype))


def _word_bytes(shape: tuple[int, ...]) -> int:
    return 4 * math.prod(shape)


def _max_stages(stage_bytes: int, output_bytes: int) -> int:
    return (_SHARED_BYTES - output_bytes - 2048) // stage_bytes


@dataclasses.dataclass(frozen=True)
class MaskTiles:
    """Shapes of the words of one mask in shared memory.

    Attributes:
        shrink: Those that come with a stage of shrink.
        outer: Those that come with a stage of outer.
        expand: Those that come with an output tile of expand.
        num_expand_copies: Copies that fill those of an output tile.
    """

    shrink: tuple[int, ...]
    outer: tuple[int, ...]
    expand: tuple[tuple[int, ...], ...]
    num_expand_copies: int


@dataclasses.dataclass(frozen=True)
class RingShape:
    """The contents of a kernel's shared memory.

    Attributes:
        num_stages: Number of stages.
        x_tile: Shape of a stage's first operand. Each warpgroup reads one half.
        w_tile: Shape of a stage's second operand.
        stage_words: Shape of the mask words that come with a stage; None: none do.
        num_copies: Copies that fill a stage. The loader's time goes by their number.
        out_tile: Shape of the output tiles; the wide product's starts with the number
            of warpgroups and the number of copies in flight. None: there are none.
        sum_tile: Shape of float32 tiles, which share their bytes with the output tiles;
            the outer product's starts with the number of copies in flight and the
            number of warpgroups.
        tile_words: Shapes of the mask words that come with an output tile; empty: none
            do.
        num_word_copies: Copies that fill these words.
        quantized_tile: Shape of the e4m3 tiles on their way to device memory: the
            number of warpgroups, the number of copies in flight, rows and columns.
            None: there are none.
        num_factors: Number of float32 factors that come with a stage; 0: none do.
    """

    num_stages: int
    x_tile: tuple[int, ...]
    w_tile: tuple[int, ...]
    stage_words: tuple[int, ...] | None
    num_copies: int
    out_tile: tuple[int, ...] | None = None
    sum_tile: tuple[int, ...] | None = None
    tile_words: tuple[tuple[int, ...], ...] = ()
    num_word_copies: int = 1
    quantized_tile: tuple[int, ...] | None = None
    num_factors: int = 0

    @staticmethod
    def wide(
        *, transposed: bool, num_masks: int, mask: MaskTiles | None
    ) -> "RingShape":
        """Returns the shape for a product with W in tiles of 64 x 256.

        The tiles are 256 x 64 if W is stored transposed. The words of masks take the
        bytes of the second output tile.

        Args:
            transposed: Whether W is stored transposed.
            num_masks: Number of masks.
            mask: Shapes of each mask's words; None: there are no masks.
        """
        w_tile = (COLUMNS, STEP) if transposed else (STEP, COLUMNS)
        return RingShape(
            num_stages=4,
            x_tile=(COMPUTE_WGS * ROWS, STEP),
            w_tile=w_tile,
            stage_words=None,
            num_copies=2,
            out_tile=(COMPUTE_WGS, 1 if num_masks else 2, ROWS, STEP),
            tile_words=tuple((num_masks, *words) for words in mask.expand)
            if mask
            else (),
            num_word_copies=num_masks * mask.num_expand_copies if mask else 1,
        )

    @staticmethod
    def shrink(
        num_projections: int,
        width: int,
        *,
        mask: MaskTiles | None,
        quantizes: bool = False,
        has_factors: bool = False,
    ) -> "RingShape":
        """Returns the shape for x A of projections that share x.

        Each warpgroup reduces over its own features.

        Args:
            num_projections: P.
            width: Number of ranks of a tile.
            mask: Shapes of each mask's words; None: there are no masks.
            quantizes: Whether x is also written as e4m3.
            has_factors: Whether a factor of each feature comes with a stage.
        """
        words = (num_projections, *(mask.shrink if mask else (COMPUTE_WGS * STEP,)))
        stage = 2 * COMPUTE_WGS * (ROWS + num_projections * width) * STEP
        quantized = (COMPUTE_WGS, 2, ROWS, STEP) if quantizes else None
        factors = COMPUTE_WGS * STEP if has_factors else 0
        return RingShape(
            num_stages=_max_stages(
                stage + _word_bytes(words) + 4 * factors,
                4 * ROWS * STEP + math.prod(quantized or (0,)),
            ),
            x_tile=(ROWS, COMPUTE_WGS * STEP),
            w_tile=(num_projections, width, COMPUTE_WGS * STEP),
            stage_words=words if mask else None,
            num_copies=1 + num_projections * (2 if mask else 1) + has_factors,
            out_tile=(ROWS, width),
            sum_tile=(ROWS, width),
            quantized_tile=quantized,
            num_factors=factors,
        )

    @staticmethod
    def outer(num_projections: int, *, mask: MaskTiles | None) -> "RingShape":
        """Returns the shape for wide^T narrow of projections that share wide.

        Each warpgroup has its own features of wide. With one projection, the sum of a
        short part need not wait until the one before is stored. With more of them, the
        stages need the room.
        """
        sums = (2 if num_projections == 1 else 1, COMPUTE_WGS, ROWS, STEP)
        words = (num_projections, *(mask.outer if mask else (2, ROWS)))
        stage = 2 * (COMPUTE_WGS + num_projections) * ROWS * STEP
        return RingShape(
            num_stages=_max_stages(stage + _word_bytes(words), _word_bytes(sums)),
            x_tile=(ROWS, COMPUTE_WGS * STEP),
            w_tile=(num_projections, ROWS, STEP),
            stage_words=words if mask else None,
            num_copies=1 + num_projections * (2 if mask else 1),
            sum_tile=sums,
        )

    def tiles(self, dtype) -> list:
        """Returns the scratch types of stages, words and outputs, in `Ring`'s order."""
        out = sums = None
        if self.out_tile is not None:
            out = _tiled_smem(self.out_tile, dtype)
        if self.sum_tile is not None:
            sums = _tiled_smem(self.sum_tile, jnp.float32)
        both = out is not None and sums is not None
        quantized = factors = None
        if self.quantized_tile is not None:
            quantized = _tiled_smem(self.quantized_tile, jnp.float8_e4m3fn)
        if self.num_factors:
            factors = plgpu.SMEM((self.num_stages, self.num_factors), jnp.float32)
        return [
            _tiled_smem((self.num_stages, *self.x_tile), dtype),
            _tiled_smem((self.num_stages, *self.w_tile), dtype),
            None
            if self.stage_words is None
            else plgpu.SMEM((self.num_stages, *self.stage_words), jnp.uint32),
            plgpu.RefUnion(out, sums) if both else (out, sums),
            [plgpu.SMEM(words, jnp.uint32) for words in self.tile_words] or None,
            quantized,
            factors,
        ]

    def barriers(self) -> list:
        """Returns the scratch types of the barriers, in `Ring`'s order."""
        stages = self.num_stages
        return [
            plgpu.Barrier(num_arrivals=self.num_copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=COMPUTE_WGS, num_barriers=stages),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=self.num_word_copies),
            plgpu.Barrier(num_arrivals=COMPUTE_WGS),
        ]


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
        quantized_smem: E4m3 tiles on their way to device memory, `quantized_tile`, or
            None.
        factors_smem: Factors of features, [num_stages, num_factors], float32, or None.
        stage_full: One barrier for each stage; its copies have landed.
        stage_empty: One barrier for each stage; both warpgroups have read it.
        sum_empty: Barrier; `sum_smem` may be overwritten.
        sum_full: Barrier; `sum_smem` holds the second warpgroup's sum.
        words_full: Barrier; the words of the output tile's masks have landed.
        words_empty: Barrier; both warpgroups have read the words.
    """

    shape: RingShape
    x_smem: Ref
    w_smem: Ref
    stage_words_smem: Ref
    outputs_smem: Ref
    tile_words_smem: Ref
    quantized_smem: Ref
    factors_smem: Ref
    stage_full: Ref
    stage_empty: Ref
    sum_empty: Ref
    sum_full: Ref
    words_full: Ref
    words_empty: Ref

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
        """Returns the i-th half of a stage's x, 64 x 64."""
        half = pl.ds(i * STEP, STEP)
        if self.shape.x_tile[0] == ROWS:
            return self.x_smem.at[stage, :, half]
        return self.x_smem.at[stage, half]

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
        if self.shape.tile_words:
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

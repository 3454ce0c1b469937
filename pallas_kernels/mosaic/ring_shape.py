"""The shapes of what a kernel keeps in shared memory; see `Ring`."""

import dataclasses
import math

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

ROWS = 64  # token rows of one warpgroup: the M of one wgmma
STEP = 64  # reduction step: 128 bytes of bf16, the widest swizzle
COLUMNS = 256  # the most columns of a tile of the wide product
COMPUTE_WGS = 2  # warpgroups that compute
_SHARED_BYTES = 227 * 1024


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
        expand: Those that come with an output tile of expand; None is the number of
            columns of the tile.
        num_expand_copies: Copies that fill those of an output tile.
    """

    shrink: tuple[int, ...]
    outer: tuple[int, ...]
    expand: tuple[tuple[int | None, ...], ...]
    num_expand_copies: int


@dataclasses.dataclass(frozen=True)
class RingShape:
    """The contents of a kernel's shared memory.

    Attributes:
        num_stages: Number of stages.
        x_tile: Shape of a stage's first operand, in 16-bit elements. Each warpgroup
            reads one half.
        w_tile: Shape of a stage's second operand, in 16-bit elements.
        stage_words: Shape of the mask words that come with a stage; None: none do.
        num_copies: Copies that fill a stage. The loader's time goes by their number.
        out_tile: Shape of the output tiles; the wide product's starts with the number
            of warpgroups and the number of copies in flight. None: there are none.
        sum_tile: Shape of float32 tiles, which share their bytes with the output tiles;
            the outer product's starts with the number of copies in flight and the
            number of warpgroups.
        tile_words: Shapes of the mask words that come with an output tile; empty: none
            do.
        tile_scales: Numbers of scales that come with an output tile: of its rows, and
            of its columns; empty: none do.
        num_word_copies: Copies that fill these words and scales.
        quantized_tile: Shape of the e4m3 tiles on their way to device memory: the
            number of warpgroups, the number of copies in flight, rows and columns.
            None: there are none.
        num_factors: Number of factors of features that come with a stage; 0: none do.
        factor_dtype: Dtype of these factors.
        result_tile: Shape of the tiles of a row-wise function's results on their way to
            device memory: the number of results, of warpgroups and of copies in flight,
            rows and columns. None: there are none.
        value_dtype: Dtype of the operands of the steps over K, in the same bytes as
            the 16-bit operands of the rank steps; None: both have the same dtype.
        columns: Columns of an output tile of the wide product; None: it is another one.
    """

    num_stages: int
    x_tile: tuple[int, ...]
    w_tile: tuple[int, ...]
    stage_words: tuple[int, ...] | None
    num_copies: int
    out_tile: tuple[int, ...] | None = None
    sum_tile: tuple[int, ...] | None = None
    tile_words: tuple[tuple[int, ...], ...] = ()
    tile_scales: tuple[int, ...] = ()
    num_word_copies: int = 1
    quantized_tile: tuple[int, ...] | None = None
    num_factors: int = 0
    factor_dtype: DTypeLike = jnp.float32
    result_tile: tuple[int, ...] | None = None
    value_dtype: DTypeLike | None = None
    columns: int | None = None

    @staticmethod
    def wide(
        *,
        transposed: bool,
        num_masks: int,
        mask: MaskTiles | None,
        value_dtype: DTypeLike | None = None,
        num_scales: int = 0,
        columns: int = COLUMNS,
    ) -> "RingShape":
        """Returns the shape for a product with W in tiles of 64 x 256.

        The tiles are 256 x 64 if W is stored transposed. The words of masks take the
        bytes of the second output tile.

        Args:
            transposed: Whether W is stored transposed.
            num_masks: Number of masks.
            mask: Shapes of each mask's words; None: there are no masks.
            value_dtype: Dtype of x and W if it is not that of s and B. W is stored
                transposed then.
            num_scales: 1 if the result's rows are scaled, 2 if its columns are too.
            columns: Columns of a tile, in place of 256: a multiple of 64 below it.
        """
        num_mask_copies = num_masks * mask.num_expand_copies if mask else 0
        w_tile = (columns, STEP) if transposed else (STEP, columns)
        return RingShape(
            num_stages=4,
            x_tile=(COMPUTE_WGS * ROWS, STEP),
            w_tile=w_tile,
            stage_words=None,
            num_copies=2,
            out_tile=(COMPUTE_WGS, 1 if num_masks else 2, ROWS, STEP),
            tile_words=tuple(
                (num_masks, *(columns if n is None else n for n in words))
                for words in (mask.expand if mask else ())
            ),
            tile_scales=(COMPUTE_WGS * ROWS, columns)[:num_scales],
            columns=columns,
            num_word_copies=max(num_mask_copies + num_scales, 1),
            value_dtype=value_dtype,
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
    def produce(
        num_projections: int,
        width: int,
        *,
        mask: MaskTiles | None,
        num_tiles: int,
        num_results: int,
        features: tuple[DTypeLike, ...],
    ) -> "RingShape":
        """Returns the shape for a row-wise function with side products.

        Args:
            num_projections: P, the number of side products.
            width: Number of ranks of a tile.
            mask: Shapes of each mask's words; None: there are no masks.
            num_tiles: Number of its arguments that are tiles.
            num_results: Number of its results.
            features: Dtypes of its vectors of features, which are the same.
        """
        columns = COMPUTE_WGS * STEP
        words = (num_projections, *mask.shrink) if mask else (0,)
        stage = 2 * columns * (num_tiles * ROWS + num_projections * width)
        stage += _word_bytes(words)
        stage += columns * sum(jnp.dtype(dtype).itemsize for dtype in features)

        def num_stages(num_buffers: int) -> int:
            results = 2 * num_results * COMPUTE_WGS * num_buffers * ROWS * STEP
            return _max_stages(stage, 4 * ROWS * width + results)

        # Two copies of a result are in flight, if that leaves two stages.
        num_buffers = 2 if num_stages(2) >= 2 else 1
        num_copies = num_tiles + len(features) + num_projections * (2 if mask else 1)
        return RingShape(
            num_stages=num_stages(num_buffers),
            x_tile=(num_tiles, ROWS, columns),
            w_tile=(num_projections, width, columns),
            stage_words=words if mask else None,
            num_copies=num_copies,
            out_tile=(ROWS, width),
            sum_tile=(ROWS, width),
            num_factors=columns * len(features),
            factor_dtype=features[0] if features else jnp.float32,
            result_tile=(num_results, COMPUTE_WGS, num_buffers, ROWS, STEP),
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

    @property
    def k_step(self) -> int:
        """Number of features of a step over K: 128 bytes."""
        itemsize = jnp.dtype(self.value_dtype).itemsize if self.value_dtype else 2
        return 2 * STEP // itemsize

    @property
    def has_tile_inputs(self) -> bool:
        """Whether words or scales come with an output tile."""
        return bool(self.tile_words or self.tile_scales)

    def tile_groups(self, dtype) -> list[list]:
        """Returns the scratch types of stages, words and outputs, in `Ring`'s order.

        The rank steps' operands are a group of their own if their dtype is another.
        They share the bytes of the first two types of the first group.
        """
        if self.value_dtype is None:
            return [self._tiles(dtype)]
        return [self._tiles(dtype), self._stages(dtype)]

    def _tiles(self, dtype) -> list:
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
            factors = plgpu.SMEM((self.num_stages, self.num_factors), self.factor_dtype)
        results = None
        if self.result_tile is not None:
            results = _tiled_smem(self.result_tile, dtype)
        return [
            *self._stages(self.value_dtype or dtype),
            None
            if self.stage_words is None
            else plgpu.SMEM((self.num_stages, *self.stage_words), jnp.uint32),
            plgpu.RefUnion(out, sums) if both else (out, sums),
            [plgpu.SMEM(words, jnp.uint32) for words in self.tile_words] or None,
            [plgpu.SMEM((n,), jnp.float32) for n in self.tile_scales] or None,
            quantized,
            factors,
            results,
        ]

    def _stages(self, dtype) -> list:
        """Returns the scratch types of both operands, as tiles of a dtype."""
        ratio = 2 / jnp.dtype(dtype).itemsize
        return [
            _tiled_smem((self.num_stages, *tile[:-1], int(tile[-1] * ratio)), dtype)
            for tile in (self.x_tile, self.w_tile)
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

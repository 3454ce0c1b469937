"""The producer kernel: a row-wise function, and s of all linears that take its results.

`results = f(tiles, rows, features)`, and `s = factor * dropout(result) A` of each side
product. The kernel is generated from f, which can be any row-wise function; see
row_function.py.

Grid, items and pipeline are those of shrink.py, with one tile for each argument in a
stage. Each warpgroup evaluates f on its 64 of the 128 features, multiplies by A from
registers, and sends the results to device memory through buffers of its own.
See docs/hopper_kernels.md.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxlora.pallas_kernels.mosaic.mask import (
    PER_COLUMN,
    PER_ROW,
    MaskTiles,
    load_words,
)
from jaxlora.pallas_kernels.mosaic.ring import (
    COMPUTE_WGS,
    ROWS,
    STEP,
    Ref,
    RingShape,
    Smem,
    stages_that_fit,
)
from jaxlora.pallas_kernels.mosaic.shrink import WIDTH, Shrink, output_smem
from jaxlora.pallas_kernels.row_function import (
    RowArguments,
    RowFunction,
    RowProgram,
    Value,
    row_program,
    tile_of,
)

_TILE = ROWS, STEP


def produce_ring(
    num_projections: int,
    width: int,
    dtype: DTypeLike,
    mask: MaskTiles | None,
    *,
    num_tiles: int,
    num_results: int,
    features: tuple[DTypeLike, ...],
) -> RingShape:
    """Returns the ring of `Produce` for a row-wise function.

    Args:
        num_projections: P, the number of side products.
        width: Number of ranks of a tile.
        dtype: Dtype of the function's tiles and results.
        mask: Shapes of each mask's words; None: there are no masks.
        num_tiles: Number of the function's arguments that are tiles.
        num_results: Number of its results.
        features: Dtypes of its vectors of features, which are the same.
    """
    words = (num_projections, *mask.shrink) if mask else (0,)
    stage_bytes = 2 * WIDTH * (num_tiles * ROWS + num_projections * width)
    stage_bytes += 4 * math.prod(words)
    stage_bytes += WIDTH * sum(jnp.dtype(one).itemsize for one in features)

    def num_stages(num_buffers: int) -> int:
        results = 2 * num_results * COMPUTE_WGS * num_buffers * ROWS * STEP
        return stages_that_fit(stage_bytes, 4 * ROWS * width + results)

    # Two copies of a result are in flight, if that leaves two stages.
    num_buffers = 2 if num_stages(2) >= 2 else 1
    stages, factors = num_stages(num_buffers), None
    if features:
        factors = Smem.flat(stages, WIDTH * len(features), dtype=features[0])
    results = num_results, COMPUTE_WGS, num_buffers, ROWS, STEP
    return RingShape.of(
        num_stages=stages,
        num_copies=num_tiles + len(features) + num_projections * (2 if mask else 1),
        x_smem=Smem((stages, num_tiles, ROWS, WIDTH), dtype),
        a_smem=Smem((stages, num_projections, width, WIDTH), dtype),
        words_smem=Smem.flat(stages, *words) if mask else None,
        outputs_smem=output_smem(width, dtype),
        factors_smem=factors,
        result_smem=Smem(results, dtype),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Produce(Shrink):
    """Computes items of s and, in those of the first chunk of ranks, the results.

    Rows of padding are computed as other rows are, with the adapter of slot 0 for s,
    which nobody reads; or they are left out.

    A stage has a tile of each argument, so x_smem is [num_stages, tiles, 64, 128].

    Attributes:
        factors_smem: Values of features that come with a stage, [num_stages, 128 times
            their number], or None.
        result_smem: Results on their way to device memory, by result, warpgroup and
            copy in flight, [results, 2, 1 or 2, 64, 64].
        more_gmem: The tiles after the first one, which is `x_gmem`, [T, K].
        row_gmem: The values of rows, [T].
        feature_gmem: The values of features, [K].
        result_gmem: The results, [T, K].
        function: The row-wise function.
        sides: Number of the result that each side product takes.
        skips_padding: Whether rows of padding are left out, and not written.
    """

    factors_smem: Ref = None
    result_smem: Ref
    more_gmem: tuple[Ref, ...]
    row_gmem: tuple[Ref, ...]
    feature_gmem: tuple[Ref, ...]
    result_gmem: tuple[Ref, ...]
    function: RowFunction
    sides: tuple[int, ...]
    skips_padding: bool

    @property
    def _program(self) -> RowProgram:
        tiles = self.x_gmem, *self.more_gmem
        arguments = RowArguments(tiles, self.row_gmem, self.feature_gmem)
        return row_program(self.function, arguments, ROWS)

    def _is_needed(self, chunk, slot):
        return (chunk == 0) | super()._is_needed(chunk, slot)

    def prefetch(self, item):
        """Reads (slot, number of steps) of an item."""
        block, chunk = self._block_and_chunk(item)
        given, num_steps = self.slot_gmem[block], self.x_gmem.shape[1] // WIDTH
        slot = jnp.maximum(given, 0)
        is_needed = self._is_needed(chunk, slot)
        if self.skips_padding:
            is_needed &= given >= 0
        return slot, jnp.where(is_needed, jnp.int32(num_steps), 0)

    def load(self, index, item, prefetched, step):
        """Fills the stages of one item; returns the next step of the ring."""
        del index
        (block, chunk), (slot, num_steps) = self._block_and_chunk(item), prefetched
        rows = pl.ds(block * ROWS, ROWS)

        def fill(i, step):
            stage = self.ring.acquire(step)
            full, ks = self.ring.stage_full.at[stage], pl.ds(i * WIDTH, WIDTH)
            for t, tile_gmem in enumerate((self.x_gmem, *self.more_gmem)):
                tile_smem = self.x_smem.at[stage, t]
                plgpu.copy_gmem_to_smem(tile_gmem.at[rows, ks], tile_smem, full)
            for f, feature_gmem in enumerate(self.feature_gmem):
                own = pl.ds(f * WIDTH, WIDTH)
                feature_smem = self.factors_smem.at[stage, own]
                plgpu.copy_gmem_to_smem(feature_gmem.at[ks], feature_smem, full)
            self._fill_operands(stage, block, slot, chunk, ks, full)
            return step + 1

        return lax.fori_loop(0, num_steps, fill, step)

    def _row_values(self, block) -> list[Value]:
        """Loads the values of a block's rows."""
        rows = pl.ds(block * ROWS, ROWS)
        each = (load_words(row.at[rows], PER_ROW) for row in self.row_gmem)
        return [Value("row", words) for words in each]

    def _known(self, stage, wg, rows: list[Value]) -> dict:
        """Loads a warpgroup's half of the arguments in a stage."""
        known, names = {}, iter(self._program.inputs)
        half = pl.ds(wg * STEP, STEP)
        for t in range(1 + len(self.more_gmem)):
            tile_smem = self.x_smem.at[stage, t, :, half]
            tile = plgpu.load(tile_smem, layout=plgpu.Layout.WGMMA)
            known[next(names)] = Value("tile", tile)
        for value in rows:
            known[next(names)] = value
        for f in range(len(self.feature_gmem)):
            own = pl.ds(f * WIDTH + wg * STEP, STEP)
            words = load_words(self.factors_smem.at[stage, own], PER_COLUMN)
            known[next(names)] = Value("feature", words)
        return known

    def compute(self, item, prefetched, step, wg):
        """Computes one item; returns the next step of the ring."""
        (block, chunk), (slot, num_steps) = self._block_and_chunk(item), prefetched
        rows = self._row_values(block)
        tokens = [mask.shrink_tokens(block) for mask in self.masks]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def accumulate(*accs):
            def multiply(now):
                stage = self.ring.wait(now)
                results = self._results(stage, wg, rows)
                for p, (acc, result) in enumerate(zip(accs, self.sides, strict=True)):
                    x = self._masked(results[result], stage, wg, p, tokens, slot)
                    a_smem = self.a_smem.at[stage, p, :, pl.ds(wg * STEP, STEP)]
                    plgpu.wgmma(acc, x, a_smem.transpose((1, 0)))
                column = ((now - step) * COMPUTE_WGS + wg) * STEP
                self._send(results, now - step, (block, column), chunk, wg)

            after = self.ring.each_step(num_steps, step, multiply, num_in_flight=0)
            return [acc[...] for acc in accs], after

        width = self.a_smem.shape[2]
        accs = [plgpu.ACC((ROWS, width), jnp.float32)] * len(self.a_gmem)
        sums, step = pl.run_scoped(accumulate, *accs)
        self._finish(sums, item, prefetched, wg, ())
        return step

    def _results(self, stage, wg, rows: list[Value]) -> list:
        """Evaluates the function on a warpgroup's half of a stage."""
        known, program = self._known(stage, wg, rows), self._program
        values = (program.evaluate(one, known) for one in program.results)
        return [tile_of(value, _TILE) for value in values]

    def _send(self, results, i, at, chunk, wg) -> None:
        """Starts the copies of a step's results to device memory."""
        block, column = at
        num_buffers = self.result_smem.shape[2]
        buffer = lax.rem(i, jnp.int32(num_buffers))

        def send():
            for q, (value, result_gmem) in enumerate(
                zip(results, self.result_gmem, strict=True)
            ):
                in_flight = num_buffers * len(results) - 1
                plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
                tile_smem = self.result_smem.at[q, wg, buffer]
                tile_smem[...] = value
                plgpu.commit_smem()
                rows, columns = pl.ds(block * ROWS, ROWS), pl.ds(column, STEP)
                plgpu.copy_smem_to_gmem(tile_smem, result_gmem.at[rows, columns])

        pl.when(chunk == 0)(send)

"""The quantizing shrink kernel: x as e4m3, and `s = factor * dropout(x) A`.

It reads x once. Grid, items and pipeline are those of shrink.py: while a stage is
multiplied by A, each warpgroup multiplies its 64 x 64 of x by the inverse scales of the
rows, rounds to e4m3, and sends the tile to device memory through one of two buffers.
See docs/kernels.md.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxlora.pallas_kernels.mosaic.mask import PER_ROW, load_words
from jaxlora.pallas_kernels.mosaic.ring import Ref
from jaxlora.pallas_kernels.mosaic.ring_shape import COMPUTE_WGS, STEP
from jaxlora.pallas_kernels.mosaic.shrink import Shrink

# A thread has four consecutive elements of a row: one word of e4m3.
_LAYOUT = plgpu.Layout.WGMMA_8BIT


@dataclasses.dataclass(frozen=True)
class QuantizeShrink(Shrink):
    """Computes items of s and, in those of the first chunk of ranks, quantizes x.

    Rows are quantized whether or not their slot adapts a projection. Rows of padding
    are not written.

    Attributes:
        inverse_gmem: The inverse of each row's scale, [T], float32.
        factor_gmem: Factors of the features, [K], float32; None: they are 1.
        xq_gmem: `x * factor * inverse`, rounded to the nearest e4m3, [T, K]; None: x is
            not quantized.
        folded_gmem: `s * inverse` of each projection, [T, R], or None.
    """

    inverse_gmem: Ref
    factor_gmem: Ref
    xq_gmem: Ref
    folded_gmem: tuple[Ref, ...] | None

    def _is_needed(self, chunk, slot):
        needed = super()._is_needed(chunk, slot)
        return needed if self.xq_gmem is None else needed | (chunk == 0)

    def _fill_more(self, stage, features, full) -> None:
        if self.factor_gmem is not None:
            factors_smem = self.ring.factors_smem.at[stage]
            plgpu.copy_gmem_to_smem(self.factor_gmem.at[features], factors_smem, full)

    def _row_vectors(self, rows) -> tuple:
        """Reads the inverse scales of the rows, for tiles of x and for tiles of s."""
        inverse = self.inverse_gmem.at[rows]
        of_x = None if self.xq_gmem is None else load_words(inverse, _LAYOUT.reduce(1))
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
        x_smem = self.ring.x_half(stage, wg)
        x = plgpu.load(x_smem, layout=_LAYOUT, optimized=False).astype(jnp.float32)
        if self.factor_gmem is not None:
            own = self.ring.factors_smem.at[stage, pl.ds(wg * STEP, STEP)]
            x = x * _spread(load_words(own, _LAYOUT.reduce(0)), x, axis=1)
        x = x * _spread(inverse, x, axis=0)
        num_buffers = self.ring.quantized_smem.shape[1]
        # Each item starts with the first buffer, which the last one may have used last.
        pl.when(i == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        plgpu.wait_smem_to_gmem(num_buffers - 1, wait_read_only=True)
        tile = self.ring.quantized_smem.at[wg, lax.rem(i, jnp.int32(num_buffers))]
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
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, x.shape, (axis,)), _LAYOUT)

"""The kernel of a norm's gradient: it reads each array once, and adds the residual's.

The gradient of a row needs two sums along it, so XLA reads the rows in one kernel to
add up and in a second one to write. Here a warpgroup holds a row in registers from the
first load to the store.

Grid: one program, of one warpgroup, for `num_rows` rows. Loads of all its rows are
under way at once, and several programs share a multiprocessor, which hides the time
that the sums take. A thread loads 16 bytes at a time, so that the warpgroup takes a row
in pieces of 2 KiB; see `Pieces`. See docs/hopper_kernels.md.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxlora.pallas_kernels.device import traces_shapes_only
from jaxlora.pallas_kernels.mosaic.compile import runnable
from jaxlora.pallas_kernels.mosaic.hopper import interpret_params

_THREADS = 128
_LOAD_BYTES = 16  # of a thread at a time; the most there is
_PROGRAM_BYTES, _MAX_ROWS = 4096, 2  # the fastest for 576 to 8,192 features


def rows_of_a_program(num_features: int, itemsize: int) -> int:
    """Returns how many rows a program takes: more of them if they are short."""
    return min(max(_PROGRAM_BYTES // (num_features * itemsize), 1), _MAX_ROWS)


def norm_gradient(
    h: Float[Array, "T D"],
    scale: Float[Array, " D"],
    dx: Float[Array, "T D"],
    dh: Float[Array, "T D"],
    *,
    eps: float,
    offset: bool,
) -> Float[Array, "T D"]:
    """Computes `dh` plus the gradient of a norm; see `Backend.norm_gradient`.

    Args:
        h: Rows that were normalized.
        scale: Factor of each feature, or the factor less 1.
        dx: Gradient of the normalized rows.
        dh: Gradient that h has from elsewhere.
        eps: Added to the mean square.
        offset: Whether the factor is `1 + scale`.
    """
    if traces_shapes_only():
        return jnp.zeros(h.shape, h.dtype)
    inputs = h, scale, dx.astype(h.dtype), dh.astype(h.dtype)
    kernel = NormGradientKernel(
        shapes=tuple((x.shape, x.dtype) for x in inputs),
        eps=eps,
        offset=offset,
        num_rows=rows_of_a_program(h.shape[1], h.dtype.itemsize),
    )
    return _run(inputs, kernel=kernel, interpret=interpret_params())


# It is traced and lowered once for all norms of like shapes.
@functools.partial(jax.jit, static_argnames=("kernel", "interpret"))
def _run(inputs: tuple[Array, ...], *, kernel: Any, interpret: Any) -> Array:
    run = jax.custom_batching.sequential_vmap(runnable(kernel, interpret))
    return run(*inputs)[0]


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of a row that a warpgroup holds, all of the same width.

    A row that is no multiple of the width ends with a piece that overlaps the one
    before it. The sums leave out what both have, and both store the same bits there.

    Attributes:
        width: Number of features of a piece.
        vector: Number of neighbouring features that a thread has.
        starts: First feature of each piece.
        overlap: Number of features that the last piece shares with the one before.
    """

    width: int
    vector: int
    starts: tuple[int, ...]
    overlap: int

    @classmethod
    def of(cls, num_features: int, dtype: DTypeLike) -> "Pieces":
        """Chooses the widest vectors that rows in device memory are aligned to.

        They are of 8 bytes instead of 16 where these divide a row and those do not.
        """
        widest = _LOAD_BYTES // jnp.dtype(dtype).itemsize
        aligned = math.gcd(widest, num_features)
        while aligned * _THREADS > num_features:
            aligned //= 2
        halves = [v for v in (aligned, aligned // 2) if 2 * v >= widest]
        whole = [v for v in halves if num_features % (v * _THREADS) == 0]
        vector = whole[0] if whole else aligned
        width = vector * _THREADS
        starts = [*range(0, num_features - width + 1, width)]
        overlap = -num_features % width
        if overlap:
            starts.append(num_features - width)
        return cls(width, vector, tuple(starts), overlap)

    @property
    def layout(self) -> Any:
        """Where the features of a piece are in the registers of a warpgroup."""
        return plgpu.Layout.WG_STRIDED((self.width,), self.vector)

    def load(self, row_gmem) -> list:
        """Loads the pieces of a row."""
        at = [row_gmem.at[pl.ds(start, self.width)] for start in self.starts]
        return [plgpu.load(one, layout=self.layout, optimized=False) for one in at]

    def sum(self, values: list):
        """Sums over all features of a row, in float32, in an order of its own."""
        *most, last = values
        if self.overlap:
            shape, layout = (self.width,), self.layout
            feature = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
            last = jnp.where(feature >= self.overlap, last, 0.0)
        return jnp.sum(functools.reduce(lax.add, [*most, last]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormGradientKernel:
    """All that the kernel is compiled from.

    Attributes:
        shapes: Shape and dtype of h, scale, dx and dh.
        eps: Added to the mean square.
        offset: Whether the factor is `1 + scale`.
        num_rows: Rows of a program.
    """

    shapes: tuple[tuple[tuple[int, ...], jnp.dtype], ...]
    eps: float
    offset: bool
    num_rows: int

    @property
    def inputs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of h, scale, dx and dh."""
        return [jax.ShapeDtypeStruct(*one) for one in self.shapes]

    @property
    def out_types(self) -> list[jax.ShapeDtypeStruct]:
        """The shape of the result."""
        return self.inputs[:1]

    def function(self, interpret: Any = None) -> Callable[..., list[Array]]:
        """Returns the kernel as a function of its inputs, to be traced.

        Args:
            interpret: Parameters of Pallas' GPU interpreter, or None.
        """
        return plgpu.kernel(
            self._body,
            out_type=self.out_types,
            grid=(-(-self.inputs[0].shape[0] // self.num_rows),),
            grid_names=("program",),
            kernel_name="norm_gradient",
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                # Nothing is both read and written.
                unsafe_no_auto_barriers=True,
            ),
        )

    def _body(self, h_gmem, scale_gmem, dx_gmem, dh_gmem, out_gmem) -> None:
        """The code of a program, for references to inputs and result."""
        num_tokens, num_features = h_gmem.shape
        pieces = Pieces.of(num_features, h_gmem.dtype)
        first = lax.axis_index("program") * self.num_rows
        # The last program computes the last row again where rows are missing.
        rows = [jnp.minimum(first + i, num_tokens - 1) for i in range(self.num_rows)]
        scale = pieces.load(scale_gmem)
        given = h_gmem, dx_gmem, dh_gmem
        loaded = [[pieces.load(x.at[row]) for x in given] for row in rows]
        for row, (h, dx, dh) in zip(rows, loaded, strict=True):
            results = self._row(pieces, h, scale, dx, dh)
            for start, result in zip(pieces.starts, results, strict=True):
                at = row, pl.ds(start, pieces.width)
                out_gmem[at] = result.astype(out_gmem.dtype)

    def _row(self, pieces: Pieces, h: list, scale: list, dx: list, dh: list) -> list:
        """Computes a row of the result from pieces of the inputs.

        Rows wait in their own dtype, which takes half the registers, and are widened
        again after the sums.
        """
        num_features = self.inputs[0].shape[1]

        def wide():
            """The piece of h in float32, and the gradient before the scale."""
            for one, factor, d in zip(h, map(_wide, scale), dx, strict=True):
                yield _wide(one), _wide(d) * (1 + factor if self.offset else factor)

        mean_square = pieces.sum([one * one for one, _ in wide()]) / num_features
        inverse = lax.rsqrt(mean_square + self.eps)
        mean = pieces.sum([one * dnormed for one, dnormed in wide()]) / num_features
        along = inverse * inverse * mean
        return [
            _wide(d) + inverse * (dnormed - along * one)
            for d, (one, dnormed) in zip(dh, wide(), strict=True)
        ]


def _wide(x):
    return x.astype(jnp.float32)

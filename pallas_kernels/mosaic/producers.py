"""Row-wise functions with side products, as functions of arrays; see `Produce`."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlora.pallas_kernels.given_mask import GivenMask
from jaxlora.pallas_kernels.mosaic.launch import Work
from jaxlora.pallas_kernels.mosaic.mask import BitMask, HashMask, Mask, make_mask
from jaxlora.pallas_kernels.mosaic.produce import Produce
from jaxlora.pallas_kernels.mosaic.products import rows_read, run, tiles_of
from jaxlora.pallas_kernels.mosaic.ring_shape import (
    COMPUTE_WGS,
    ROWS,
    STEP,
    MaskTiles,
    RingShape,
)
from jaxlora.pallas_kernels.operands import (
    make_operands,
    padded_rank,
    unsupported_dtype,
)
from jaxlora.pallas_kernels.projection import Projection
from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.quantized.rows import scale_of
from jaxlora.pallas_kernels.routing import Blocks, make_blocks
from jaxlora.pallas_kernels.row_function import (
    RowArguments,
    RowFunction,
    row_program,
)
from jaxlora.pallas_kernels.settings import KernelSettings

_MIN_STAGES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """A side product of a row-wise function: `s = factor * dropout(result) A`.

    Attributes:
        result: Number of the result.
        a: [G, R, K].
        settings: Settings of the slots.
    """

    result: int
    a: Array
    settings: KernelSettings


def produce(
    function: RowFunction,
    arguments: RowArguments,
    sides: Sequence[Side],
    blocks: Blocks,
    masks: Sequence[Mask] = (),
) -> tuple[list[Array], list[Array]]:
    """Computes the results of a row-wise function, and its side products.

    Args:
        function: The function.
        arguments: Its arguments.
        sides: The side products; at least one.
        blocks: Slots of the rows.
        masks: Mask of each side product; empty without dropout.

    Returns:
        The results, [T, K], and s of each side product, [T, R].
    """
    ring = _ring(function, arguments, len(sides), sides[0].a.shape[1], tiles_of(masks))
    out = _run(function, arguments, sides, blocks, masks, ring)
    return list(out["result_gmem"]), list(out["s_gmem"])


@dataclasses.dataclass(frozen=True)
class WithMagnitude:
    """A row-wise function that also returns what the scales of its rows depend on.

    Its last arguments are float32 factors of features, one for each result. Its last
    result is, in float32, the largest magnitude of a result times its factor.
    """

    function: RowFunction
    num_results: int

    def __call__(self, *arguments: Array) -> tuple[Array, ...]:
        """Returns the results, and the magnitudes [T, K]."""
        given, factors = arguments[: -self.num_results], arguments[-self.num_results :]
        results = self.function(*given)
        scaled = (
            jnp.abs(x.astype(jnp.float32) * f)
            for x, f in zip(results, factors, strict=True)
        )
        return *results, functools.reduce(jnp.maximum, scaled)


def produce_to_quantize(
    function: RowFunction,
    arguments: RowArguments,
    factors: Sequence[Array],
    blocks: Blocks,
) -> tuple[list[Array], Float[Array, " T"]]:
    """Computes the results of a row-wise function, and the scale of each row.

    Args:
        function: The function.
        arguments: Its arguments.
        factors: Factors of the features with which each result is quantized, float32.
        blocks: Slots of the rows.

    Returns:
        The results, [T, K], and the scale that all of them share; see `row_scale`.
    """
    function, arguments = _with_magnitude(function, arguments, factors)
    ring = _ring(function, arguments, 0, 0, None)
    out = _run(function, arguments, [], blocks, [], ring)
    return list(out["result_gmem"]), scale_of(out["largest_gmem"].max(axis=0))


def _with_magnitude(
    function: RowFunction, arguments: RowArguments, factors: Sequence[Array]
) -> tuple[WithMagnitude, RowArguments]:
    """Adds the factors to the arguments of a function."""
    features = [*arguments.features, *factors]
    return WithMagnitude(function, len(factors)), arguments._replace(features=features)


def _run(
    function: RowFunction,
    arguments: RowArguments,
    sides: Sequence[Side],
    blocks: Blocks,
    masks: Sequence[Mask],
    ring: RingShape,
) -> dict[str, Any]:
    """Returns the results of `Produce`, by name."""
    x, *more = arguments.tiles
    r = sides[0].a.shape[1] if sides else 0
    of, num_results = jax.ShapeDtypeStruct, _num_results(function, arguments)
    settings = [side.settings for side in sides]
    largest = None
    if isinstance(function, WithMagnitude):
        largest = of((COMPUTE_WGS, x.shape[0]), jnp.float32)
    work = Work(
        role=Produce,
        operands={
            "x_gmem": x,
            "more_gmem": tuple(more),
            "row_gmem": tuple(arguments.rows),
            "feature_gmem": tuple(arguments.features),
            "a_gmem": tuple(side.a for side in sides),
            "slot_gmem": blocks.slot,
            "settings": rows_read(settings, "factor", "num_chunks", masks=masks),
            "masks": tuple(masks),
        },
        out_types=(
            ("result_gmem", (of(x.shape, x.dtype),) * num_results),
            ("s_gmem", (of((x.shape[0], r), x.dtype),) * len(sides)),
            ("largest_gmem", largest),
        ),
        num_items=blocks.slot.shape[0] * max(math.ceil(r / STEP), 1),
        ring=ring,
        static_args=(
            ("function", function),
            ("sides", tuple(side.result for side in sides)),
        ),
        approx_math=True,
    )
    return run([work], x.dtype)[0]


def _num_results(function: RowFunction, arguments: RowArguments) -> int:
    """Returns the number of results that are stored."""
    program = row_program(function, arguments, ROWS)
    return len(program.results) - isinstance(function, WithMagnitude)


def _ring(
    function: RowFunction,
    arguments: RowArguments,
    num_sides: int,
    rank: int,
    mask: MaskTiles | None,
) -> RingShape:
    """Returns the shape of the ring of a function with side products."""
    return RingShape.produce(
        num_sides,
        min(rank, STEP),
        mask=mask,
        num_tiles=len(arguments.tiles),
        num_results=_num_results(function, arguments),
        features=tuple(x.dtype for x in arguments.features),
    )


# ---- as a back end's producer: see `backends.Producer` -------------------------------


def unsupported(
    function: RowFunction,
    arguments: RowArguments,
    projections: Sequence[Projection],
    *,
    is_gradient: bool,
) -> str | None:
    """Returns why the kernel cannot compute such a function, or None if it can."""
    t, k = arguments.tiles[0].shape
    if (reason := unsupported_dtype(arguments.tiles[0].dtype)) is not None:
        return reason
    if k % (COMPUTE_WGS * STEP) or t % ROWS:
        wanted = f"multiples of {ROWS} and {COMPUTE_WGS * STEP}"
        return f"the {t} rows of {k} features are not {wanted}"
    if is_gradient and (factors := _factors(projections)):
        if arguments.features:
            return "a function with vectors of features has no scales of rows beside"
        ring = _ring(*_with_magnitude(function, arguments, factors), 0, 0, None)
        return None if ring.num_stages >= _MIN_STAGES else "its tiles leave no room"
    dropout = None if is_gradient else projections[0].dropout
    mask = None
    if dropout is not None:
        mask = (BitMask if isinstance(dropout, GivenMask) else HashMask).tiles
    rank = padded_rank(max(p.a.shape[2] for p in projections))
    ring = _ring(function, arguments, len(projections), rank, mask)
    if ring.num_stages < _MIN_STAGES:
        return f"{len(projections)} side products of rank {rank} leave no room"
    return None


def produce_for(
    function: RowFunction,
    arguments: RowArguments,
    projections: Sequence[Projection],
    block_adapter: Array,
    *,
    is_gradient: bool,
) -> tuple[list[Array], Any]:
    """Computes a row-wise function with what linears need; see `backends.Produce`."""
    if is_gradient and (factors := _factors(projections)):
        slots = projections[0].a.shape[0]
        blocks = make_blocks(block_adapter, slots, arguments.tiles[0].shape[0])
        return produce_to_quantize(function, arguments, factors, blocks)
    given = make_operands(arguments.tiles[0], projections, block_adapter)
    operands = given.b if is_gradient else [a.transpose(0, 2, 1) for a in given.a]
    sides = [
        Side(result=i if is_gradient else 0, a=a, settings=settings)
        for i, (a, settings) in enumerate(zip(operands, given.settings, strict=True))
    ]
    masks = [] if is_gradient else list(map(make_mask, given.masks))
    return produce(function, arguments, sides, given.blocks, masks)


def _factors(projections: Sequence[Projection]) -> list[Array]:
    """Returns the factors with which gradients of y are quantized; empty: none are."""
    weights = [p.w for p in projections if isinstance(p.w, Fp8Weight)]
    return [w.scale for w in weights if w.fp8_backward]

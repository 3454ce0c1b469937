"""Row-wise functions with side products, as functions of arrays; see `Produce`."""

import dataclasses
import math
from collections.abc import Sequence

import jax
from jaxtyping import Array

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
from jaxlora.pallas_kernels.routing import Blocks
from jaxlora.pallas_kernels.row_function import (
    RowArguments,
    RowFunction,
    RowProgram,
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
    (x, *more), r = arguments.tiles, sides[0].a.shape[1]
    program = row_program(function, arguments, ROWS)
    results = (jax.ShapeDtypeStruct(x.shape, x.dtype),) * len(program.results)
    s = (jax.ShapeDtypeStruct((x.shape[0], r), x.dtype),) * len(sides)
    settings = [side.settings for side in sides]
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
        out_types=(("result_gmem", results), ("s_gmem", s)),
        num_items=blocks.slot.shape[0] * math.ceil(r / STEP),
        ring=_ring(program, arguments, len(sides), r, tiles_of(masks)),
        static_args=(
            ("function", function),
            ("sides", tuple(side.result for side in sides)),
        ),
        approx_math=True,
    )
    out = run([work], x.dtype)[0]
    return list(out["result_gmem"]), list(out["s_gmem"])


def _ring(
    program: RowProgram,
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
        num_results=len(program.results),
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
    dropout = None if is_gradient else projections[0].dropout
    mask = None
    if dropout is not None:
        mask = (BitMask if isinstance(dropout, GivenMask) else HashMask).tiles
    rank = padded_rank(max(p.a.shape[2] for p in projections))
    program = row_program(function, arguments, ROWS)
    ring = _ring(program, arguments, len(projections), rank, mask)
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
) -> tuple[list[Array], list[Array]]:
    """Computes a row-wise function with the side products of linears."""
    given = make_operands(arguments.tiles[0], projections, block_adapter)
    operands = given.b if is_gradient else [a.transpose(0, 2, 1) for a in given.a]
    sides = [
        Side(result=i if is_gradient else 0, a=a, settings=settings)
        for i, (a, settings) in enumerate(zip(operands, given.settings, strict=True))
    ]
    masks = [] if is_gradient else list(map(make_mask, given.masks))
    return produce(function, arguments, sides, given.blocks, masks)

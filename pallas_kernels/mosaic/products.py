"""The kernels as functions of arrays: `shrink`, `produce`, `expand` and `outer`.

Each builds a `Work`, which `launch` runs. `expand_with_outers` runs an expand and the
outer products that do not depend on it in one launch.

With e4m3 operands, the frozen product takes `x = xs * xq` and `W = ws * wq`, with xq
and wq in float8_e4m3fn, a scale xs for each row of x and a scale ws for each column of
W. Its accumulator holds y / (xs ws). So the LoRA term can share it as
`(s / xs) (B / ws)`, in bfloat16; `quantize_shrink` computes xq and s / xs. See
docs/hopper_kernels.md.

References:
    FP8 Formats for Deep Learning, arXiv 2209.05433, section 3 (the e4m3 format).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxlora.pallas_kernels.dropout import TILE_TOKENS
from jaxlora.pallas_kernels.expert_rows import SMALL_BLOCK, SharedBlocks
from jaxlora.pallas_kernels.mosaic import hopper as device
from jaxlora.pallas_kernels.mosaic.expand import TILE_ROWS, Expand, expand_ring
from jaxlora.pallas_kernels.mosaic.launch import Work, launch
from jaxlora.pallas_kernels.mosaic.mask import HashMask, Mask, MaskTiles
from jaxlora.pallas_kernels.mosaic.outer import (
    NARROW_COLUMNS,
    TILE_COLUMNS,
    Outer,
    outer_ring,
)
from jaxlora.pallas_kernels.mosaic.produce import Produce, produce_ring
from jaxlora.pallas_kernels.mosaic.ring import COLUMNS, ROWS, STEP, RingShape
from jaxlora.pallas_kernels.mosaic.shrink import QuantizeShrink, Shrink, shrink_ring
from jaxlora.pallas_kernels.mosaic.tuning import (
    EXPERT_SPLITS,
    EXPERT_TILE_STEPS,
    MAX_SIDE_SMS,
    OuterCost,
    band_for,
    best_plan,
    columns_for,
    expert_band_for,
    shares_for,
    splits_for,
)
from jaxlora.pallas_kernels.operands import Blocks, Term
from jaxlora.pallas_kernels.parts import (
    BAD_BIT,
    Parts,
    PartTable,
    make_parts,
    max_split_slots,
    sum_parts,
)
from jaxlora.pallas_kernels.projection import KernelSettings
from jaxlora.pallas_kernels.row_function import RowArguments, RowFunction, row_program

_MIN_STAGES = 3  # with fewer stages, the computing warpgroups would wait for data
_MAX_OUTERS = 3  # the compiler takes minutes for more works in a kernel


def rows_read(
    settings: Sequence[KernelSettings], *names: str, masks: Sequence[Mask]
) -> tuple[KernelSettings, ...]:
    """Returns the settings with only the rows that a kernel reads.

    With masks that are computed, the kernel also reads the thresholds.
    """
    names += ("threshold",) if masks and isinstance(masks[0], HashMask) else ()
    return tuple(one.only(*names) for one in settings)


def tiles_of(masks: Sequence[Mask]) -> MaskTiles | None:
    """Returns the shapes of each mask's words; None without masks."""
    return masks[0].tiles if masks else None


def shrink(x, a, settings, blocks: Blocks, masks) -> list[Array]:
    """Computes `s = factor * dropout(x) A` of each projection; see `Shrink`.

    Args:
        x: [T, K].
        a: A of each projection, [G, R, K].
        settings: Settings of each projection.
        blocks: Slots of the rows.
        masks: Mask of each projection; empty without dropout.

    Returns:
        s of each projection, [T, R].
    """
    return list(_shrink(x, a, settings, blocks, masks)["s_gmem"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
    """The results of `quantize_shrink`.

    Attributes:
        xq: The quantized rows, [T, K], e4m3; rows of padding are not written.
        s: s of each projection, [T, R]; see `shrink`.
        folded: s times the inverse scale of each row, [T, R].
    """

    xq: Array
    s: list[Array]
    folded: list[Array]


def quantize_shrink(
    x, a, settings, blocks: Blocks, masks, *, inverse: Array, features=None
) -> Quantized:
    """Quantizes x and computes s of each projection; see `QuantizeShrink`.

    It reads x once, unless the projections need too many stages' room.

    Args:
        x: [T, K].
        a: A of each projection, [G, R, K]; at least one.
        settings: Settings of each projection.
        blocks: Slots of the rows.
        masks: Mask of each projection; empty without dropout.
        inverse: The inverse of each row's scale, [T], float32.
        features: Factor of each feature in xq, [K], float32; None: they are 1. s is of
            x itself.
    """
    factors = inverse, features
    out = _shrink(x, a, settings, blocks, masks, factors, writes_xq=True)
    return Quantized(
        xq=out["xq_gmem"], s=list(out["s_gmem"]), folded=list(out["folded_gmem"])
    )


def _shrink(
    x,
    a,
    settings,
    blocks: Blocks,
    masks,
    factors: tuple[Array, Array | None] | None = None,
    *,
    writes_xq: bool = False,
) -> dict[str, Any]:
    """Returns the results of `Shrink` by name; with factors, of `QuantizeShrink`."""
    r = a[0].shape[1]
    ring = shrink_ring(
        len(a),
        min(r, STEP),
        x.dtype,
        tiles_of(masks),
        quantizes=writes_xq,
        has_factors=factors is not None and factors[1] is not None,
    )
    if ring.num_stages < _MIN_STAGES:  # one projection always fits
        first, rest = (
            _shrink(x, a[p], settings[p], blocks, masks[p], factors, writes_xq=writes)
            for p, writes in ((slice(0, 1), writes_xq), (slice(1, None), False))
        )
        return first | {k: first[k] + rest[k] for k in rest if k != "xq_gmem"}
    s = (jax.ShapeDtypeStruct((x.shape[0], r), x.dtype),) * len(a)
    num_items = blocks.slot.shape[0] * math.ceil(r / STEP)
    operands = {
        "x_gmem": x,
        "a_gmem": tuple(a),
        "slot_gmem": blocks.slot,
        "settings": rows_read(settings, "factor", "num_chunks", masks=masks),
        "masks": tuple(masks),
    }
    if (shared := blocks.shared) is not None:
        assert r < STEP and not masks and factors is None
        num_items = shared.slot.shape[0]
        operands |= {
            "slot_gmem": shared.slot,
            "shared_gmem": (blocks.order, shared.rows),
            "settings": rows_read(settings, "factor", masks=masks),
            "num_items_gmem": blocks.starts[-1:],
        }
    role, out_types = Shrink, (("s_gmem", s),)
    if factors is not None:
        xq = jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn) if writes_xq else None
        role = QuantizeShrink
        out_types = ("xq_gmem", xq), *out_types, ("folded_gmem", s)
        operands |= dict(zip(("inverse_gmem", "factor_gmem"), factors, strict=True))
    work = Work(
        role=role,
        operands=operands,
        out_types=out_types,
        num_items=num_items,
        ring=ring,
    )
    return launch([work])[0]


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
        ring=producer_ring(function, arguments, len(sides), r, tiles_of(masks)),
        static_args=(
            ("function", function),
            ("sides", tuple(side.result for side in sides)),
            ("skips_padding", blocks.num_tiles is not None),
        ),
        approx_math=True,
    )
    out = launch([work])[0]
    return list(out["result_gmem"]), list(out["s_gmem"])


def producer_ring(
    function: RowFunction,
    arguments: RowArguments,
    num_sides: int,
    rank: int,
    mask: MaskTiles | None,
) -> RingShape:
    """Returns the ring of a function with side products.

    Args:
        function: The function.
        arguments: Its arguments, or their shapes.
        num_sides: Number of side products.
        rank: R.
        mask: Shapes of each mask's words; None: there are no masks.
    """
    return produce_ring(
        num_sides,
        min(rank, STEP),
        arguments.tiles[0].dtype,
        mask,
        num_tiles=len(arguments.tiles),
        num_results=len(row_program(function, arguments, ROWS).results),
        features=tuple(x.dtype for x in arguments.features),
    )


def expand_work(
    terms: Sequence[Term],
    layer: Int[Array, " _"],
    blocks: Blocks,
    bias: Array | None = None,
    *,
    transposed: bool,
    band: int | None = None,
    scales: tuple[Array, ...] = (),
) -> Work:
    """Makes the work that computes the sum of `x W + mask * (s B)`, + bias.

    Args:
        terms: The terms of the sum; all have a mask of the same kind or none has. s is
            in the dtype of the result. B is [G, N, R] if the product is `transposed`.
        layer: Index of the layer in every W, [1]; or of each tile of 128 rows.
        blocks: Slots of the rows.
        bias: [N]; [L, N] if the layer goes by tile.
        transposed: Whether W and B are stored transposed.
        band: Tile rows visited together; None: the tuning table's choice.
        scales: Scales of the sum's rows, [T], or of its rows and its columns, [N], all
            positive, for x and W in float8_e4m3fn. The product must be `transposed`
            then, and K and N multiples of 64. Without masks, s and B come divided
            by the scales. Rows of padding of y are zero, whatever the operands hold.
    """
    x, w = [term.x for term in terms], terms[0].w
    t, n = x[0].shape[0], w.shape[1] if transposed else w.shape[2]
    k = sum(part.shape[1] for part in x)
    settings = [term.settings for term in terms]
    masks = [term.mask for term in terms if term.mask is not None]
    narrow_rank = None if scales else narrow_rank_for(blocks, terms[0].s.shape[1])
    b = [term.b for term in terms]
    if narrow_rank is not None and not transposed:
        b = [one.transpose(0, 2, 1) for one in b]
    rows = blocks.planned_number * ROWS
    # On an fp8 base, narrower tiles have not been measured.
    columns = COLUMNS if scales else columns_for(rows, n, device.num_sms())
    if band is None and blocks.num_tiles is not None:
        band = expert_band_for(rows / TILE_ROWS, w.shape[0])
    band = band or band_for(device.device_kind(), t, k, n)
    num_columns = math.ceil(n / columns)
    chunks = ("num_chunks",) if blocks.shared is None else ()
    assert blocks.shared is None or (narrow_rank is not None and not masks)
    return Work(
        role=Expand,
        operands={
            "x_gmem": tuple(x),
            "w_gmem": tuple(term.w for term in terms),
            "s_gmem": tuple(term.s for term in terms),
            "b_gmem": tuple(b),
            "settings": rows_read(settings, *chunks, masks=masks),
            "layer_gmem": layer,
            "slot_gmem": blocks.slot,
            "group_gmem": None if blocks.shared is None else blocks.shared.small,
            "num_items_gmem": _live_tiles(blocks, band, num_columns),
            "bias_gmem": bias,
            "scale_gmem": scales,
            "masks": tuple(masks),
        },
        out_types=(("y_gmem", jax.ShapeDtypeStruct((t, n), terms[0].s.dtype)),),
        num_items=math.ceil(t / TILE_ROWS) * num_columns,
        ring=expand_ring(
            x[0].dtype,
            terms[0].s.dtype,
            [mask.tiles for mask in masks],
            transposed=transposed,
            num_scales=len(scales),
            columns=columns,
            narrow_rank=narrow_rank,
        ),
        static_args=(("transposed", transposed), ("band", band)),
    )


def narrow_rank_for(blocks: Blocks, rank: int) -> int | None:
    """Returns the ranks of a step over ranks if that is better than 64; else None.

    Experts' products have few features, and 64 ranks take as long as 64 of these.
    """
    return rank if blocks.num_tiles is not None and rank < STEP else None


def outer_width_for(blocks: Blocks, rank: int) -> int:
    """Returns the ranks of an outer product's tile."""
    return narrow_rank_for(blocks, rank) or STEP


def _live_tiles(blocks: Blocks, band: int, num_columns: int) -> Array | None:
    """Returns the number of tiles in bands of rows that are not all padding, [1]."""
    if blocks.num_tiles is None:
        return None
    most = math.ceil(blocks.slot.shape[0] * ROWS / TILE_ROWS)
    rows = -(-blocks.num_tiles // band) * band
    return jnp.minimum(rows, most) * num_columns


def run_expand(work: Work) -> Array:
    """Runs the work of an expand product alone and returns y, [T, N]."""
    return launch([work])[0]["y_gmem"]


def outer_work(
    wide,
    narrow,
    settings,
    blocks: Blocks,
    masks,
    *,
    transposed,
    splits=None,
    num_ranks=None,
    is_bad=None,
) -> tuple[Work, Parts]:
    """Makes the work that computes `wide^T narrow` over parts of each slot's rows.

    Args:
        wide: [T, K].
        narrow: The other factor of each projection, [T, R].
        settings: Settings of each projection.
        blocks: Slots of the rows.
        masks: Mask of wide for each projection; empty without dropout.
        transposed: Whether to compute `narrow^T wide` instead.
        splits: The most parts of a slot's rows; None: the tuning table's choice.
        num_ranks: Number of ranks of the result, if it is `transposed`; None: R.
        is_bad: Whether wide may hold a NaN or an infinity in each shared block, [NB].
    """
    k, r = wide.shape[1], narrow[0].shape[1]
    out_r = r
    if transposed and num_ranks:  # whole tiles of eight, or a part of one
        out_r = num_ranks if num_ranks < 8 else -(-num_ranks // 8) * 8
    width, columns = outer_width_for(blocks, r), TILE_COLUMNS
    if width < STEP:
        narrow = [_by_color(one, blocks.shared) for one in narrow]
        columns = TILE_COLUMNS if masks else NARROW_COLUMNS
    if splits is None and blocks.num_tiles is not None:
        splits = EXPERT_SPLITS
    splits = splits or splits_for(device.device_kind(), k, device.num_sms())
    num_slots = blocks.starts.shape[0] - 1
    # With few slots, all may be split, and one gather makes the result.
    direct = num_slots > max_split_slots(blocks.slot.shape[0])
    parts = make_parts(blocks, splits, direct=direct)
    table, order = parts.table, blocks.order
    if blocks.num_tiles is not None:
        table, order = _of_experts(table, order, is_bad), None
    shares = shares_for(splits, parts.usual_number)
    chunks = ("num_chunks",) if blocks.shared is None else ()

    def out(num_rows):
        shape = (num_rows, *((out_r, k) if transposed else (k, out_r)))
        return (jax.ShapeDtypeStruct(shape, jnp.float32),) * len(narrow)

    work = Work(
        role=Outer,
        operands={
            "wide_gmem": wide,
            "narrow_gmem": tuple(narrow),
            "order_gmem": order,
            "parts": table,
            "settings": rows_read(settings, *chunks, masks=masks),
            "masks": tuple(masks),
        },
        out_types=(
            ("out_gmem", out(parts.num_rows)),
            ("result_gmem", out(num_slots) if direct else None),
        ),
        num_items=math.ceil(k / columns) * shares * math.ceil(r / STEP),
        ring=outer_ring(
            len(narrow),
            wide.dtype,
            tiles_of(masks),
            width=width,
            columns=columns,
            transposed=transposed,
        ),
        static_args=(("shares", shares), ("transposed", transposed)),
    )
    return work, parts


def _by_color(rows: Array, shared: SharedBlocks | None) -> Array:
    """Returns side products [R, T], or [4 R, T] by the colors of rows in shared blocks.

    Rows of other colors are zeros.
    """
    if shared is None:
        return rows.T
    slot, colors = shared.small, jnp.arange(TILE_TOKENS // SMALL_BLOCK)
    color = jnp.where(slot < 0, -1, shared.color[jnp.maximum(slot, 0)])
    is_own = jnp.repeat(color, SMALL_BLOCK)[:, None] == colors
    # XLA makes one kernel of this, and two of the transpose first.
    return jnp.where(is_own[:, :, None], rows[:, None], 0).reshape(len(rows), -1).T


def _of_experts(table: PartTable, order, is_bad: Array | None) -> PartTable:
    """Returns parts with their first blocks: those of an expert's slot are consecutive.

    Args:
        table: The parts, with places in `order`.
        order: `Blocks.order`.
        is_bad: See `outer_work`; None if no block is shared.
    """
    first = order[jnp.minimum(table.first_block, order.shape[0] - 1)]
    if (rows := table.rows) is not None:
        assert is_bad is not None
        last = first + jnp.maximum(table.num_blocks - 1, 0)
        rows = rows | (is_bad[first] | is_bad[last]).astype(jnp.int32) << BAD_BIT
    return dataclasses.replace(table, first_block=first, rows=rows)


def outer(*args, **kwargs) -> list[Array]:
    """Runs `outer_work` alone; returns each projection's gradient, [G, K, R]."""
    work, parts = outer_work(*args, **kwargs)
    return _gradients(parts, launch([work])[0])


def _gradients(parts: Parts, results: dict[str, Any]) -> list[Array]:
    sums = results["out_gmem"]
    whole = results["result_gmem"] or [None] * len(sums)
    each = zip(sums, whole, strict=True)
    return [sum_parts(one, parts, result) for one, result in each]


def _max_side_sms(blocks: Blocks, outers: Sequence[OuterCost]) -> int:
    """Returns the most side multiprocessors.

    Experts have few features, so expand takes little longer than the outer products.
    More side multiprocessors make it faster for narrow tiles; and for others of one
    projection, with two outer products, but not of several.
    """
    if blocks.num_tiles is None:
        return MAX_SIDE_SMS
    if all(one.is_narrow for one in outers):
        return 3 * MAX_SIDE_SMS
    return 4 * MAX_SIDE_SMS if len(outers) == 2 else MAX_SIDE_SMS


def expand_with_outers(
    expand: Work, outers: list[tuple[Work, Parts]], blocks: Blocks
) -> tuple[Array, list[list[Array]]]:
    """Runs an expand and outer products in one launch; returns y and the gradients.

    Some of the outer products' items run on multiprocessors that expand leaves idle.
    """
    outers, alone = outers[:_MAX_OUTERS], outers[_MAX_OUTERS:]
    num_blocks = blocks.planned_number
    num_tiles = expand.num_items * num_blocks // blocks.slot.shape[0]
    smem = dict(expand.ring.smem)
    _, _, k_step = smem["x_smem"].shape
    columns = smem["w_smem"].shape[1 if dict(expand.static_args)["transposed"] else 2]
    steps = [math.ceil(x.shape[1] / k_step) for x in expand.operands["x_gmem"]]
    costs = [
        OuterCost(
            num_items=work.num_items,
            steps_per_item=num_blocks / dict(work.static_args)["shares"],
            parts_per_item=parts.usual_number / dict(work.static_args)["shares"],
            num_masks=len(work.operands["masks"]),
            is_narrow=dict(work.ring.smem)["wide_smem"].shape[2] > TILE_COLUMNS,
        )
        for work, parts in outers
    ]
    more = 0 if blocks.num_tiles is None else EXPERT_TILE_STEPS
    wide_steps = (sum(steps) + more) * columns / COLUMNS
    sms = device.num_sms(), _max_side_sms(blocks, costs)
    _, plan = best_plan(num_tiles, wide_steps, costs, *sms)
    works = [expand]
    for (work, _), num_items in zip(outers, plan.num_side_items, strict=True):
        works.append(dataclasses.replace(work, num_side_items=num_items))
    results = launch(works, plan.num_side_sms)
    results += [launch([work])[0] for work, _ in alone]
    each = zip((*outers, *alone), results[1:], strict=True)
    return results[0]["y_gmem"], [_gradients(parts, sums) for (_, parts), sums in each]

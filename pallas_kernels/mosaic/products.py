"""The three products as functions of arrays: `shrink`, `expand` and `outer`.

Each builds a `Work`, which `launch` runs. `expand_with_outers` runs an expand and the
outer products that do not depend on it in one launch. See docs/kernels.md.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxlora.pallas_kernels.mosaic import hopper as device
from jaxlora.pallas_kernels.mosaic.expand import TILE_ROWS, Expand
from jaxlora.pallas_kernels.mosaic.launch import Work, launch
from jaxlora.pallas_kernels.mosaic.mask import HashMask, Mask
from jaxlora.pallas_kernels.mosaic.outer import TILE_COLUMNS, Outer
from jaxlora.pallas_kernels.mosaic.quantize import QuantizeShrink
from jaxlora.pallas_kernels.mosaic.ring_shape import COLUMNS, STEP, MaskTiles, RingShape
from jaxlora.pallas_kernels.mosaic.shrink import Shrink
from jaxlora.pallas_kernels.mosaic.tuning import (
    OuterCost,
    band_for,
    columns_for,
    plan_side_items,
    shares_for,
    splits_for,
)
from jaxlora.pallas_kernels.parts import Parts, make_parts, max_split_slots, sum_parts
from jaxlora.pallas_kernels.routing import Blocks
from jaxlora.pallas_kernels.settings import KernelSettings

_MIN_STAGES = 3  # with fewer stages, the computing warpgroups would wait for data
_MAX_OUTERS = 3  # the compiler takes minutes for more works in a kernel


def run(works: list[Work], dtype, num_side_sms: int = 0) -> list[dict[str, Any]]:
    return launch(
        works,
        dtype=jnp.dtype(dtype),
        num_sms=device.num_sms(),
        num_side_sms=num_side_sms,
        interpret=device.interpret_params(),
    )


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
    r = a[0].shape[1]
    width = min(r, STEP)
    ring = RingShape.shrink(len(a), width, mask=tiles_of(masks))
    if ring.num_stages < _MIN_STAGES:  # one projection always fits
        first, rest = (
            shrink(x, a[p], settings[p], blocks, masks[p])
            for p in (slice(0, 1), slice(1, None))
        )
        return first + rest
    out = [jax.ShapeDtypeStruct((x.shape[0], r), x.dtype)] * len(a)
    work = Work(
        role=Shrink,
        operands=_shrink_operands(x, a, settings, blocks, masks),
        out_types=(("s_gmem", tuple(out)),),
        num_items=blocks.slot.shape[0] * math.ceil(r / STEP),
        ring=ring,
    )
    return list(run([work], x.dtype)[0]["s_gmem"])


def _shrink_operands(x, a, settings, blocks: Blocks, masks) -> dict[str, Any]:
    """Returns the operands that `Shrink` and `QuantizeShrink` share."""
    return {
        "x_gmem": x,
        "a_gmem": tuple(a),
        "slot_gmem": blocks.slot,
        "settings": rows_read(settings, "factor", "num_chunks", masks=masks),
        "masks": tuple(masks),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFactors:
    """The factors of an array that is quantized by rows.

    Attributes:
        inverse: The inverse of each row's scale, [T], float32.
        features: Factor of each feature, [K], float32; None: they are 1.
    """

    inverse: Array
    features: Array | None = None


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
    x, a, settings, blocks: Blocks, masks, factors: RowFactors
) -> Quantized:
    """Quantizes x and computes s of each projection; see `QuantizeShrink`.

    It reads x once, unless the projections need too many stages' room.

    Args:
        x: [T, K].
        a: A of each projection, [G, R, K]; at least one.
        settings: Settings of each projection.
        blocks: Slots of the rows.
        masks: Mask of each projection; empty without dropout.
        factors: Factors with which x is quantized; s is of x itself.
    """
    given = x, a, settings, blocks, masks, factors
    out = _quantize_shrink(*given, writes_xq=True)
    return Quantized(
        xq=out["xq_gmem"], s=list(out["s_gmem"]), folded=list(out["folded_gmem"])
    )


def _quantize_shrink(
    x, a, settings, blocks: Blocks, masks, factors: RowFactors, *, writes_xq: bool
) -> dict[str, Any]:
    """Returns the results of `QuantizeShrink`, by name; xq only if it is wanted."""
    r = a[0].shape[1]
    width = min(r, STEP)
    ring = RingShape.shrink(
        len(a),
        width,
        mask=tiles_of(masks),
        quantizes=writes_xq,
        has_factors=factors.features is not None,
    )
    if ring.num_stages < _MIN_STAGES:  # one projection always fits
        first, rest = (
            _quantize_shrink(
                x, a[p], settings[p], blocks, masks[p], factors, writes_xq=writes
            )
            for p, writes in ((slice(0, 1), writes_xq), (slice(1, None), False))
        )
        return first | {k: first[k] + rest[k] for k in ("s_gmem", "folded_gmem")}
    s = (jax.ShapeDtypeStruct((x.shape[0], r), x.dtype),) * len(a)
    xq = jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn) if writes_xq else None
    work = Work(
        role=QuantizeShrink,
        operands=_shrink_operands(x, a, settings, blocks, masks)
        | {"inverse_gmem": factors.inverse, "factor_gmem": factors.features},
        out_types=(("xq_gmem", xq), ("s_gmem", s), ("folded_gmem", s)),
        num_items=blocks.slot.shape[0] * math.ceil(r / STEP),
        ring=ring,
    )
    return run([work], x.dtype)[0]


@dataclasses.dataclass(frozen=True)
class Term:
    """The operands of one projection's term in an expand product.

    Attributes:
        x: [T, K].
        w: [L, K, N]; [L, N, K] if the product is `transposed`.
        s: [T, R], in the dtype of the result.
        b: [G, R, N]; [G, N, R] if the product is `transposed`.
        settings: Settings of the slots.
    """

    x: Array
    w: Array
    s: Array
    b: Array
    settings: KernelSettings


def expand_work(
    terms: Sequence[Term],
    layer: Int[Array, " 1"],
    blocks: Blocks,
    bias: Array | None = None,
    masks: Sequence[Mask] = (),
    *,
    transposed: bool,
    band: int | None = None,
    scales: tuple[Array, ...] = (),
) -> Work:
    """Makes the work that computes the sum of `x W + mask * (s B)`, + bias.

    Args:
        terms: The terms of the sum.
        layer: Index of the layer in every W.
        blocks: Slots of the rows.
        bias: [N].
        masks: Mask of each term; empty without dropout.
        transposed: Whether W and B are stored transposed.
        band: Tile rows visited together; None: the tuning table's choice.
        scales: Scales of the sum's rows, [T], or of its rows and its columns, [N], for
            x and W in float8_e4m3fn. The product must be `transposed` then.
    """
    x, w = [term.x for term in terms], terms[0].w
    t, n = x[0].shape[0], w.shape[1] if transposed else w.shape[2]
    k = sum(part.shape[1] for part in x)
    settings = [term.settings for term in terms]
    # On an fp8 base, narrower tiles have not been measured.
    columns = COLUMNS if scales else columns_for(t, n, device.num_sms())
    return Work(
        role=Expand,
        operands={
            "x_gmem": tuple(x),
            "w_gmem": tuple(term.w for term in terms),
            "s_gmem": tuple(term.s for term in terms),
            "b_gmem": tuple(term.b for term in terms),
            "settings": rows_read(settings, "num_chunks", masks=masks),
            "layer_gmem": layer,
            "slot_gmem": blocks.slot,
            "bias_gmem": bias,
            "scale_gmem": scales,
            "masks": tuple(masks),
        },
        out_types=(("y_gmem", jax.ShapeDtypeStruct((t, n), terms[0].s.dtype)),),
        num_items=math.ceil(t / TILE_ROWS) * math.ceil(n / columns),
        ring=RingShape.wide(
            transposed=transposed,
            num_masks=len(masks),
            mask=tiles_of(masks),
            value_dtype=x[0].dtype if scales else None,
            num_scales=len(scales),
            columns=columns,
        ),
        static_args=(
            ("transposed", transposed),
            ("band", band or band_for(device.device_kind(), t, k, n)),
        ),
    )


def expand(*args, **kwargs) -> Array:
    """Runs `expand_work` alone and returns y, [T, N]."""
    return run_expand(expand_work(*args, **kwargs))


def run_expand(work: Work) -> Array:
    """Runs the work of an expand product alone and returns y, [T, N]."""
    return run([work], dict(work.out_types)["y_gmem"].dtype)[0]["y_gmem"]


def outer_work(
    wide, narrow, settings, blocks: Blocks, masks, *, transposed, splits=None
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
    """
    k, r = wide.shape[1], narrow[0].shape[1]
    splits = splits or splits_for(device.device_kind(), k, device.num_sms())
    num_slots = blocks.starts.shape[0] - 1
    # With few slots, all may be split, and one gather makes the result.
    direct = num_slots > max_split_slots(blocks.slot.shape[0])
    parts = make_parts(blocks, splits, direct=direct)
    shares = shares_for(splits, parts.usual_number)

    def out(num_rows):
        shape = (num_rows, *((r, k) if transposed else (k, r)))
        return (jax.ShapeDtypeStruct(shape, jnp.float32),) * len(narrow)

    work = Work(
        role=Outer,
        operands={
            "wide_gmem": wide,
            "narrow_gmem": tuple(narrow),
            "order_gmem": blocks.order,
            "parts": parts.table,
            "settings": rows_read(settings, "num_chunks", masks=masks),
            "masks": tuple(masks),
        },
        out_types=(
            ("out_gmem", out(parts.num_rows)),
            ("result_gmem", out(num_slots) if direct else None),
        ),
        num_items=math.ceil(k / TILE_COLUMNS) * shares * math.ceil(r / STEP),
        ring=RingShape.outer(len(narrow), mask=tiles_of(masks)),
        static_args=(("shares", shares), ("transposed", transposed)),
    )
    return work, parts


def outer(*args, **kwargs) -> list[Array]:
    """Runs `outer_work` alone; returns each projection's gradient, [G, K, R]."""
    work, parts = outer_work(*args, **kwargs)
    results = run([work], work.operands["wide_gmem"].dtype)[0]
    return _gradients(parts, results)


def _gradients(parts: Parts, results: dict[str, Any]) -> list[Array]:
    sums = results["out_gmem"]
    whole = results["result_gmem"] or [None] * len(sums)
    each = zip(sums, whole, strict=True)
    return [sum_parts(one, parts, result) for one, result in each]


def expand_with_outers(
    expand: Work, outers: list[tuple[Work, Parts]]
) -> tuple[Array, list[list[Array]]]:
    """Runs an expand and outer products in one launch; returns y and the gradients.

    Some of the outer products' items run on multiprocessors that expand leaves idle.
    """
    outers, alone = outers[:_MAX_OUTERS], outers[_MAX_OUTERS:]
    y = dict(expand.out_types)["y_gmem"]
    num_blocks = expand.operands["slot_gmem"].shape[0]
    k_step = expand.ring.k_step
    steps = [math.ceil(x.shape[1] / k_step) for x in expand.operands["x_gmem"]]
    costs = [
        OuterCost(
            num_items=work.num_items,
            steps_per_item=num_blocks / dict(work.static_args)["shares"],
            parts_per_item=parts.usual_number / dict(work.static_args)["shares"],
            num_masks=len(work.operands["masks"]),
        )
        for work, parts in outers
    ]
    assert expand.ring.columns is not None
    wide_steps = sum(steps) * expand.ring.columns / COLUMNS
    plan = plan_side_items(expand.num_items, wide_steps, costs, device.num_sms())
    works = [expand]
    for (work, _), num_items in zip(outers, plan.num_side_items, strict=True):
        works.append(dataclasses.replace(work, num_side_items=num_items))
    results = run(works, y.dtype, plan.num_side_sms)
    results += [run([work], y.dtype)[0] for work, _ in alone]
    each = zip((*outers, *alone), results[1:], strict=True)
    return results[0]["y_gmem"], [_gradients(parts, sums) for (_, parts), sums in each]

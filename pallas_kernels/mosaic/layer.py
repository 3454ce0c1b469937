"""Forward and backward of multi-adapter LoRA linears that share x, kernel by kernel.

Forward: shrink (s = factor dropout(x) A), expand (y = x W + s B).
Backward: shrink (ds = factor dy B'), then in one launch expand (dx = dy W' +
mask (ds A')) and the outer products dA = dropout(x)' ds and dB = s' dy. The kernels
that read x, or sum dx, do so for all projections at once.

References:
    LoRAFusion, arXiv 2510.00206, section 5.1, Figures 9 to 11.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.mosaic.device import (
    interpret_params,
    num_sms,
    unsupported_device,
)
from jaxlora.pallas_kernels.mosaic.expand import TILE_ROWS, Expand
from jaxlora.pallas_kernels.mosaic.launch import Work, launch
from jaxlora.pallas_kernels.mosaic.mask import Mask, mask_of
from jaxlora.pallas_kernels.mosaic.outer import TILE_COLUMNS, Outer
from jaxlora.pallas_kernels.mosaic.parts import Parts, add_parts, parts_of
from jaxlora.pallas_kernels.mosaic.ring import COLUMNS, ROWS, STEP, RingShape
from jaxlora.pallas_kernels.mosaic.routing import Blocks, blocks_of
from jaxlora.pallas_kernels.mosaic.shrink import Shrink
from jaxlora.pallas_kernels.mosaic.tuning import Gradient, band_for, beside, splits_for
from jaxlora.pallas_kernels.projection import LinearShape, Projection
from jaxlora.pallas_kernels.settings import RANK_STEP, KernelSettings, kernel_settings

MAX_RANK = 4 * STEP  # a tile holds the stages of all its ranks
_FEWEST_STAGES = 3  # with fewer stages, the computing warpgroups would wait for data
_MOST_BESIDE = 3  # the compiler takes minutes for more kinds of work in a kernel
assert RANK_STEP == STEP


def unsupported(shape: LinearShape) -> str | None:
    """Returns why these kernels cannot run such a linear here, or None if they can."""
    if (reason := unsupported_device()) is not None:
        return reason
    dtype, features = jnp.dtype(shape.dtype), (shape.in_features, shape.out_features)
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype.name} is neither bfloat16 nor float16"
    if any(n % STEP or n < 2 * STEP for n in features):
        return (
            f"the layer's {features[0]} x {features[1]} features are not multiples of "
            f"{STEP}, at least {2 * STEP}"
        )
    if shape.rank > MAX_RANK:
        return f"rank {shape.rank} is larger than {MAX_RANK}"
    if shape.block_tokens % ROWS:
        return f"token blocks of {shape.block_tokens} rows are not a multiple of {ROWS}"
    return None


def _padded_rank(rank: int) -> int:
    """Rounds a rank up to a size of tiles: 16, 32 or a multiple of 64."""
    return next((r for r in (16, 32) if rank <= r), -(-rank // STEP) * STEP)


def _pad_rank(x: Array, axis: int, rank: int) -> Array:
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, rank - x.shape[axis])
    return jnp.pad(x, pad)


def _run(works: list[Work], dtype, apart: int = 0) -> list[dict[str, Any]]:
    return launch(
        works,
        dtype=jnp.dtype(dtype),
        num_sms=num_sms(),
        apart=apart,
        interpret=interpret_params(),
    )


def shrink(x, a, settings, blocks: Blocks, masks) -> list:
    """s = factor * dropout(x) A of each projection, A stored G R K; see `Shrink`."""
    r, masked = a[0].shape[1], bool(masks)
    width = min(r, STEP)
    ring = RingShape.shrink(len(a), width, masked=masked)
    if ring.stages < _FEWEST_STAGES:  # one projection always fits
        parts = [
            shrink(x, a[p], settings[p], blocks, masks[p])
            for p in (slice(0, 1), slice(1, None))
        ]
        return parts[0] + parts[1]
    out = [jax.ShapeDtypeStruct((x.shape[0], r), x.dtype)] * len(a)
    work = Work(
        role=Shrink,
        operands={
            "x": x,
            "a": tuple(a),
            "slot": blocks.slot,
            "settings": _read(settings, "factor", "chunks", masks=masks),
            "masks": tuple(masks),
        },
        out_types=(("s", tuple(out)),),
        items=blocks.slot.shape[0] * math.ceil(r / STEP),
        ring=ring,
    )
    return list(_run([work], x.dtype)[0]["s"])


@dataclasses.dataclass(frozen=True)
class Term:
    """The operands of one projection's term in a wide product.

    Attributes:
        x: T K.
        w: L K N, or L N K when the product is `transposed`.
        s: T R.
        b: G R N, or G N R when the product is `transposed`.
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
) -> Work:
    """y = sum of x W + mask * (s B), + bias; see `Expand`.

    If `band` is None, it is taken from the tuning table.
    """
    x, w = [term.x for term in terms], terms[0].w
    t, n = x[0].shape[0], w.shape[1] if transposed else w.shape[2]
    k = sum(part.shape[1] for part in x)
    by_field = {
        field.name: tuple(getattr(term, field.name) for term in terms)
        for field in dataclasses.fields(Term)
    }
    return Work(
        role=Expand,
        operands={
            **by_field,
            "settings": _read(by_field["settings"], "chunks", masks=masks),
            "layer": layer,
            "slot": blocks.slot,
            "bias": bias,
            "masks": tuple(masks),
        },
        out_types=(("y", jax.ShapeDtypeStruct((t, n), x[0].dtype)),),
        items=math.ceil(t / TILE_ROWS) * math.ceil(n / COLUMNS),
        ring=RingShape.wide(transposed=transposed, masks=len(masks)),
        settings=(
            ("transposed", transposed),
            ("band", band or band_for(_device_kind(), t, k, n)),
        ),
    )


def _read(
    settings: Sequence[KernelSettings], *names: str, masks: Sequence[Mask]
) -> tuple[KernelSettings, ...]:
    """The settings with only the rows that a kernel reads, and thresholds for masks."""
    names += ("threshold",) if masks else ()
    return tuple(one.only(*names) for one in settings)


def outer_work(
    wide, narrow, settings, blocks: Blocks, masks, *, transposed, splits=None
) -> tuple[Work, Parts]:
    """wide' narrow of each slot and projection, and its parts; see `Outer`.

    If `splits` is None, it is taken from the tuning table.
    """
    k, r = wide.shape[1], narrow[0].shape[1]
    splits = splits or splits_for(_device_kind(), k, num_sms())
    parts = parts_of(blocks, splits)
    shape = (parts.items.slot.shape[0], *((r, k) if transposed else (k, r)))
    work = Work(
        role=Outer,
        operands={
            "wide": wide,
            "narrow": tuple(narrow),
            "order": blocks.order,
            "parts": parts.items,
            "settings": _read(settings, "chunks", masks=masks),
            "masks": tuple(masks),
        },
        out_types=(("out", (jax.ShapeDtypeStruct(shape, jnp.float32),) * len(narrow)),),
        items=math.ceil(k / TILE_COLUMNS) * splits * math.ceil(r / STEP),
        ring=RingShape.outer(len(narrow), masked=bool(masks)),
        settings=(("splits", splits), ("transposed", transposed)),
    )
    return work, parts


def expand(*args, **kwargs) -> Array:
    """Launches `expand_work` alone and returns its result."""
    work = expand_work(*args, **kwargs)
    return _run([work], dict(work.out_types)["y"].dtype)[0]["y"]


def outer(*args, **kwargs) -> list[Array]:
    """Launches `outer_work` alone and returns its results."""
    work, parts = outer_work(*args, **kwargs)
    return _gradients(work, parts, _run([work], work.operands["wide"].dtype)[0])


def _gradients(work: Work, parts: Parts, made: dict[str, Any]) -> list[Array]:
    splits = dict(work.settings)["splits"]
    return [add_parts(sums, parts, splits) for sums in made["out"]]


def _expand_beside(
    wide: Work, outers: list[tuple[Work, Parts]]
) -> tuple[Array, list[list[Array]]]:
    """Launches a wide product with gradients, some on SMs that it leaves idle."""
    outers, alone = outers[:_MOST_BESIDE], outers[_MOST_BESIDE:]
    y, num_blocks = dict(wide.out_types)["y"], wide.operands["slot"].shape[0]
    k = sum(x.shape[1] for x in wide.operands["x"])
    gradients = [
        Gradient(
            items=work.items,
            steps=num_blocks / dict(work.settings)["splits"],
            masks=len(work.operands["masks"]),
        )
        for work, _ in outers
    ]
    plan = beside(wide.items, math.ceil(k / STEP), gradients, num_sms())
    works = [wide]
    for (work, _), items in zip(outers, plan.items, strict=True):
        works.append(dataclasses.replace(work, beside=items))
    made = _run(works, y.dtype, plan.apart)
    made += [_run([work], y.dtype)[0] for work, _ in alone]
    each = zip((*outers, *alone), made[1:], strict=True)
    return made[0]["y"], [_gradients(*outer, sums) for outer, sums in each]


def _device_kind() -> str:
    return (
        "interpreter"
        if interpret_params() is not None
        else jax.devices()[0].device_kind
    )


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """Operands of the kernels, by projection.

    Attributes:
        a, b: LoRA matrices in the dtype of x, with ranks padded to a size of tiles.
        settings: Settings of the slots.
        masks: Dropout masks; empty: none.
        blocks: Slots of the blocks of rows.
    """

    a: list
    b: list
    settings: list
    masks: list
    blocks: Blocks


def _prepared(x, projections, block_adapter) -> _Prepared:
    largest = max(q.a.shape[2] for q in projections)
    rank = _padded_rank(largest)
    blocks = blocks_of(block_adapter, projections[0].a.shape[0], x.shape[0])
    return _Prepared(
        a=[_pad_rank(q.a.astype(x.dtype), 2, rank) for q in projections],
        b=[_pad_rank(q.b.astype(x.dtype), 1, rank) for q in projections],
        settings=[q.settings or _own_settings(q) for q in projections],
        masks=[
            mask_of(q.dropout, blocks, x.shape[1]) for q in projections if q.dropout
        ],
        blocks=blocks,
    )


def _own_settings(projection: Projection) -> KernelSettings:
    q = projection
    assert q.rank is not None
    rate = None if q.dropout is None else q.dropout.rate[None]
    return kernel_settings(q.scaling[None], q.rank[None], rate)[0]


def _swapped(x: Array) -> Array:
    return x.transpose(0, 2, 1)


@functools.partial(jax.jit, static_argnames=("w_transposed",))
def forward(
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    layer: Int[Array, " 1"],
    block_adapter: Int[Array, " NB"],
    *,
    w_transposed: bool = False,
) -> tuple[list[Array], list[Array]]:
    """Returns y [T N] of each, and s = scaling * dropout(x) A [T R] for the backward.

    Only the ranks of a block's own adapter are ever written or read in s.
    """
    p = _prepared(x, projections, block_adapter)
    a = [_swapped(a) for a in p.a]
    s = shrink(x, a, p.settings, p.blocks, p.masks)
    y = []
    for i, q in enumerate(projections):
        b = _swapped(p.b[i]) if w_transposed else p.b[i]
        term = Term(x, q.w, s[i], b, p.settings[i])
        y.append(expand([term], layer, p.blocks, q.bias, transposed=w_transposed))
    return y, s


@functools.partial(jax.jit, static_argnames=("w_transposed",))
def backward(
    dy: list[Array],
    x: Float[Array, "T K"],
    projections: tuple[Projection, ...],
    s: list[Array],
    layer: Int[Array, " 1"],
    block_adapter: Int[Array, " NB"],
    *,
    w_transposed: bool = False,
) -> tuple[Float[Array, "T K"], list[Array], list[Array]]:
    """Returns dx in x's dtype; da [G K R] and db [G R N] of each in float32."""
    p = _prepared(x, projections, block_adapter)
    ds, outers = [], []
    for i, dy_i in enumerate(dy):
        one = [p.settings[i]], p.blocks, []
        ds += shrink(dy_i, [p.b[i]], *one)
        outers.append(outer_work(dy_i, [s[i]], *one, transposed=True))
    outers.append(outer_work(x, ds, p.settings, p.blocks, p.masks, transposed=False))
    right = [_swapped(a) for a in p.a] if w_transposed else p.a
    w = [q.w for q in projections]
    terms = [Term(*one) for one in zip(dy, w, ds, right, p.settings, strict=True)]
    dx, gradients = [], []
    # A launch takes as many projections as a tile can hold the stages of.
    together = MAX_RANK // max(ds[0].shape[1], STEP)
    for first in range(0, len(projections), together):
        i = slice(first, first + together)
        work = expand_work(
            terms[i], layer, p.blocks, masks=p.masks[i], transposed=not w_transposed
        )
        part, made = _expand_beside(work, outers)
        dx.append(part)
        gradients += made
        outers = []
    *db, da = gradients
    dx = functools.reduce(jnp.add, dx)
    ranks = [q.a.shape[2] for q in projections]
    return (
        dx,
        [g[:, :, :r] for g, r in zip(da, ranks, strict=True)],
        [g[:, :r] for (g,), r in zip(db, ranks, strict=True)],
    )

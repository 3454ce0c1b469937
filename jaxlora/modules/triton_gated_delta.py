"""The gated delta rule through Triton, for NVIDIA GPUs from Ampere on."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.models.config import DeltaShape
from jaxlora.modules.length_classes import segment_bounds
from jaxlora.modules.triton_attention import padded_dim
from jaxlora.pallas_kernels import device
from jaxlora.pallas_kernels.triton.launch import Tile, launch
from jaxlora.pallas_kernels.triton.target import (
    HOPPER,
    Target,
    present_target,
    unsupported_device,
)

DeltaImplementation = Literal["xla", "triton"]

_DTYPES = "bfloat16", "float16", "float32"
_HEAD_DIMS = 16, 32, 64, 96, 128
_CHUNK = 64
_SPAN = 256  # rows of a stretch; the kernels' `SPAN`
_MAX_ROWS = 2**31 // _CHUNK  # offsets of gates are int32


class Tiles(NamedTuple):
    """Compilation settings of each kernel.

    Attributes:
        prepare: Tile of `delta_prepare`.
        forward: Tile of `delta_forward`; COLUMNS is its part of the value columns.
        backward: Tile of `delta_backward`, likewise.
        products: Tile of `delta_products`; COLUMNS is one step through the values.
        gradients: Tile of `delta_gradients`, likewise; KEYS is its part of the features
            of keys.
    """

    prepare: Tile
    forward: Tile
    backward: Tile
    products: Tile
    gradients: Tile


def _tile(num_warps: int, num_stages: int, **sizes: int) -> Tile:
    return Tile(sizes=sizes, num_warps=num_warps, num_stages=num_stages)


# The fastest of those measured on one H200 on 2026-11-30; see
# docs/measured/portable_kernels.md. A thread spills some registers, most of which it
# needs once a chunk. More than 48 KiB of shared memory cost a kernel that spills much
# time: jaxlib has it prefer shared memory to the cache, which what is spilled needs.
TILES = Tiles(
    prepare=_tile(2, 2),
    forward=_tile(2, 2, COLUMNS=32),
    backward=_tile(2, 2, COLUMNS=32),
    products=_tile(4, 3, COLUMNS=32),
    gradients=_tile(4, 1, KEYS=64, COLUMNS=64),
)
# With Hopper's own products, which take 64 rows at least. Of the kernels of gradients,
# some that load ahead had other bits from run to run on an H200.
TILES_HOPPER = TILES._replace(
    forward=_tile(4, 2, COLUMNS=64),
    backward=_tile(4, 2, COLUMNS=64),
    products=_tile(4, 1, COLUMNS=128),
    gradients=_tile(4, 1, KEYS=64, COLUMNS=128),
)
# Two stages of the scans take 66 KiB, so one program would run on a multiprocessor.
TILES_SMALL_SHARED_MEMORY = TILES._replace(
    prepare=_tile(2, 1),
    forward=_tile(4, 1, COLUMNS=64),
    backward=_tile(4, 1, COLUMNS=64),
)
_SMALL_SHARED_MEMORY = 86, 89, 120  # capabilities with 99 KiB for a block
# Operands of float32 take twice the registers, and spill some.
TILES_FLOAT32 = Tiles(
    prepare=_tile(4, 1),
    forward=_tile(4, 1, COLUMNS=16),
    backward=_tile(4, 1, COLUMNS=16),
    products=_tile(8, 1, COLUMNS=32),
    gradients=_tile(8, 1, KEYS=32, COLUMNS=32),
)


def tiles_of(dtype: Any, key_dim: int, value_dim: int, capability: int) -> Tiles:
    """Returns the tiles for heads of this size in a dtype.

    Args:
        dtype: Dtype of queries, keys and values.
        key_dim: Features of a key.
        value_dim: Features of a value.
        capability: Ten times the compute capability that is compiled for.
    """
    if jnp.dtype(dtype) == jnp.float32:
        tiles = TILES_FLOAT32
    elif capability == HOPPER:
        tiles = TILES_HOPPER
    elif capability in _SMALL_SHARED_MEMORY:
        tiles = TILES_SMALL_SHARED_MEMORY
    else:
        tiles = TILES

    def fitted(tile: Tile) -> Tile:
        sizes = dict(tile.sizes)
        if "COLUMNS" in sizes:
            # The largest power of two that divides the features of a value.
            sizes["COLUMNS"] = min(sizes["COLUMNS"], value_dim & -value_dim)
        if "KEYS" in sizes:
            sizes["KEYS"] = min(sizes["KEYS"], padded_dim(key_dim))
        return Tile(sizes=sizes, num_warps=tile.num_warps, num_stages=tile.num_stages)

    return Tiles(*map(fitted, tiles))


def triton_delta_unsupported(dtype: Any, shape: DeltaShape) -> str | None:
    """Says why Triton's kernels cannot run the gated delta rule here; None if they can.

    Args:
        dtype: Dtype of queries, keys and values.
        shape: Sizes of the rule.
    """
    if (reason := unsupported_device()) is not None:
        return reason
    if (name := jnp.dtype(dtype).name) not in _DTYPES:
        return f"dtype {name} is none of {', '.join(_DTYPES)}"
    for what, size in (("keys", shape.key_dim), ("values", shape.value_dim)):
        if size not in _HEAD_DIMS:
            sizes = ", ".join(map(str, _HEAD_DIMS))
            return f"{what} have {size} features, which is none of {sizes}"
    return None


def delta_implementation(dtype: Any, shape: DeltaShape) -> DeltaImplementation:
    """Returns what runs the gated delta rule on the default device.

    A plan is traced with the plain definition, as the packages can be missing here; its
    memory is counted apart.

    Args:
        dtype: Dtype of queries, keys and values.
        shape: Sizes of the rule.
    """
    reason = triton_delta_unsupported(dtype, shape)
    return "triton" if reason is None and device.planned_device() is None else "xla"


def triton_gated_delta_rule(
    q: Float[Array, "T HK K"],
    k: Float[Array, "T HK K"],
    v: Float[Array, "T H E"],
    g: Float[Array, "T H"],
    beta: Float[Array, "T H"],
    segment_ids: Int[Array, " T"],
) -> Float[Array, "T H E"]:
    """The gated delta rule as `gated_delta_rule` defines it.

    A row's bits depend on its own segment alone: neither on the segment's place in the
    packed rows nor on its neighbours. Products have operands of the dtype of v and sums
    in float32, in which the state is.

    Under `jax.checkpoint` the first pass computes the output alone. Otherwise, beside
    the inputs, it keeps twice v, and the states of chunks: K / 64 times v.

    Args:
        q: Queries, in v's dtype. They are divided by the root of K here.
        k: Keys, in v's dtype. Key head j serves the value heads from j R on, with
            R = H / HK.
        v: Values.
        g: Logarithm of the decay before each row; not above 0.
        beta: Share of the error that a row corrects.
        segment_ids: Segment of each row; padding rows are negative and get zeros.

    Raises:
        ValueError: There are too many rows for the kernels' offsets.
    """
    if v.shape[0] >= _MAX_ROWS:
        raise ValueError(
            f"there are {v.shape[0]} rows, and the kernels' offsets are 32 bits wide. "
            "Lower microbatch_tokens."
        )
    g, beta = g.astype(jnp.float32), beta.astype(jnp.float32)
    # Only these were compared with the definition on a GPU.
    hopper = v.dtype != jnp.float32 and q.shape[2] == v.shape[2] == 128
    target = present_target(hopper=hopper)
    return _rule(q, k, v, g, beta, _layout(segment_ids), target)


class _Layout(NamedTuple):
    """Places of segments in packed rows, as the kernels take them.

    Attributes:
        start: T. First row of each row's segment.
        end: T. The row after the last one of each row's segment.
        segment_ids: T. Segment of each row; negative for padding.
        num_rows: [1]. T.
        order: Stretches of rows, the one with most chunks first, as measured by the
            segments that begin there.
    """

    start: Array
    end: Array
    segment_ids: Array
    num_rows: Array
    order: Array


def _layout(segment_ids: Int[Array, " T"]) -> _Layout:
    num_rows = segment_ids.shape[0]
    start, end = segment_bounds(segment_ids)
    begins = start == jnp.arange(num_rows)
    chunks = jnp.where(begins, -(-(end - start) // _CHUNK), 0)
    work = jnp.pad(chunks, (0, -num_rows % _SPAN)).reshape(-1, _SPAN).sum(1)
    # There are few stretches: comparing all takes less time than a sort.
    number = jnp.arange(work.size, dtype=jnp.int32)
    longer = work > work[:, None]
    same = (work == work[:, None]) & (number < number[:, None])
    rank = (longer | same).sum(1)
    order = jnp.where(rank[:, None] == number, number[:, None], 0).sum(0)
    layout = _Layout(
        start=start,
        end=end,
        segment_ids=segment_ids.astype(jnp.int32),
        num_rows=jnp.full(1, num_rows, jnp.int32),
        order=order.astype(jnp.int32),
    )
    # Without the barrier XLA could compute it for every layer.
    return jax.lax.optimization_barrier(layout)


class _Prepared(NamedTuple):
    """The arrays of each chunk that both scans read; see the kernels.

    Attributes:
        total: Sums of the logarithms of the decays, from the start of the chunk.
        x: Inverses.
        p: Products of queries and keys, with the decays between the rows.
    """

    total: Array
    x: Array
    p: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _rule(q, k, v, g, beta, layout, target):
    prepared = _prepare(q, k, v, g, beta, layout, target)
    return _forward(q, k, v, beta, prepared, layout, target, kept=False)[0]


def _rule_forward(q, k, v, g, beta, layout, target):
    prepared = _prepare(q, k, v, g, beta, layout, target)
    out, new, state = _forward(q, k, v, beta, prepared, layout, target, kept=True)
    return out, (q, k, beta, layout, prepared, new, state)


def _rule_backward(target, saved, dout):
    q, k, beta, layout, prepared, new, state = saved
    dv, dstate = _backward(q, k, dout, beta, prepared, layout, target)
    rows = _Rows(dout, new, dv)
    gates = beta, prepared.total
    dp, da, dg, dbeta = _products(q, k, rows, gates, layout, target)
    given = q, k, rows, prepared.total, (state, dstate), (dp, da)
    dq, dk, state_dg = _gradients(*given, layout, target)
    return dq, dk, dv, dg + state_dg.sum(0), dbeta, None


# Under `jax.checkpoint` the first pass runs `_rule`, which keeps nothing.
_rule.defvjp(_rule_forward, _rule_backward, optimize_remat=True)


def _tiles(q: Array, v: Array, target: Target) -> Tiles:
    return tiles_of(v.dtype, q.shape[2], v.shape[2], target.capability)


def _constants(q: Array, v: Array) -> dict[str, Any]:
    _, key_heads, key_dim = q.shape
    return {
        "H": v.shape[1],
        "HK": key_heads,
        "K": key_dim,
        "KP": padded_dim(key_dim),
        "SCALE": key_dim**-0.5,
        "PRECISION": "tf32x3" if v.dtype == jnp.float32 else "tf32",
    }


def _like(x: Array, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape or x.shape, x.dtype)


def _chunks(num_rows: int) -> int:
    return -(-num_rows // _CHUNK)


def _prepare(q, k, v, g, beta, layout: _Layout, target: Target) -> _Prepared:
    from jaxlora.pallas_kernels.triton.gated_delta import delta_prepare

    square = _like(v, *g.shape, _CHUNK)
    found = launch(
        delta_prepare,
        (q, k, g, beta, *layout[:-1]),
        [_like(g), square, square],
        grid=(q.shape[1], _chunks(len(q))),
        tile=_tiles(q, v, target).prepare,
        target=target,
        constants=_constants(q, v),
    )
    return _Prepared(*found)


def _state(q: Array, v: Array) -> jax.ShapeDtypeStruct:
    return _like(v, _chunks(len(v)) + 1, *v.shape[1:], padded_dim(q.shape[2]))


def _forward(
    q, k, v, beta, prepared: _Prepared, layout: _Layout, target: Target, *, kept: bool
):
    from jaxlora.pallas_kernels.triton.gated_delta import delta_forward

    tile = _tiles(q, v, target).forward
    unused = _like(v, 1)
    return launch(
        delta_forward,
        (q, k, v, beta, *prepared, *layout),
        [_like(v), *([_like(v), _state(q, v)] if kept else [unused, unused])],
        grid=(v.shape[2] // tile.sizes["COLUMNS"], v.shape[1], layout.order.size),
        tile=tile,
        target=target,
        constants=_constants(q, v) | {"E": v.shape[2], "KEPT": kept},
    )


def _backward(q, k, dout, beta, prepared: _Prepared, layout: _Layout, target: Target):
    from jaxlora.pallas_kernels.triton.gated_delta import delta_backward

    tile = _tiles(q, dout, target).backward
    return launch(
        delta_backward,
        (q, k, dout, beta, *prepared, *layout),
        [_like(dout), _state(q, dout)],
        grid=(dout.shape[2] // tile.sizes["COLUMNS"], dout.shape[1], layout.order.size),
        tile=tile,
        target=target,
        constants=_constants(q, dout) | {"E": dout.shape[2]},
    )


class _Rows(NamedTuple):
    """The arrays of rows that both kernels of gradients read; see the kernels."""

    dout: Array
    new: Array
    dv: Array


def _products(q, k, rows: _Rows, gates, layout: _Layout, target: Target):
    from jaxlora.pallas_kernels.triton.gated_delta import delta_products

    dv = rows.dv
    square, gate = _like(dv, *q.shape[:2], _CHUNK), _like(gates[0])
    return launch(
        delta_products,
        (q, k, *rows, *gates, *layout[:-1]),
        [square, square, gate, gate],
        grid=(q.shape[1], _chunks(len(q))),
        tile=_tiles(q, dv, target).products,
        target=target,
        constants=_constants(q, dv) | {"E": dv.shape[2]},
    )


def _gradients(q, k, rows: _Rows, total, states, squares, layout, target: Target):
    from jaxlora.pallas_kernels.triton.gated_delta import delta_gradients

    tile = _tiles(q, rows.dout, target).gradients
    parts = -(-q.shape[2] // tile.sizes["KEYS"])
    return launch(
        delta_gradients,
        (q, k, *rows, total, *states, *squares, *layout[:-1]),
        [_like(q), _like(k), _like(total, parts, *total.shape)],
        grid=(parts, q.shape[1], _chunks(len(q))),
        tile=tile,
        target=target,
        constants=_constants(q, rows.dout) | {"E": rows.dout.shape[2]},
    )

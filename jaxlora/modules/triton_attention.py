"""Causal attention over packed rows through Triton, for NVIDIA GPUs from Ampere on."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxlora.modules.length_classes import SegmentLengths, segment_bounds
from jaxlora.modules.scoring import ATTENTION_RESULTS, Scoring, with_sinks
from jaxlora.pallas_kernels.operands import unsupported_dtype
from jaxlora.pallas_kernels.triton.launch import Tile, launch
from jaxlora.pallas_kernels.triton.target import (
    Target,
    present_target,
    unsupported_device,
)

_MAX_HEAD_DIM = 256
_WIDE_HEAD_DIM = 512
_MAX_ELEMENTS = 2**31  # offsets inside a segment are int32


class Tiles(NamedTuple):
    """Compilation settings of each kernel.

    Attributes:
        forward: Tile of `attention_forward`.
        queries: Tile of `attention_query_gradient`.
        keys: Tile of `attention_key_gradient`.
    """

    forward: Tile
    queries: Tile
    keys: Tile


def _tile(
    queries: int, keys: int, num_warps: int, num_stages: int, part: int | None = None
) -> Tile:
    sizes = {"QUERIES": queries, "KEYS": keys}
    if part is not None:
        sizes["PART"] = part
    return Tile(sizes=sizes, num_warps=num_warps, num_stages=num_stages)


# Tiles by the most features of a head. These fit into the registers and the 99 KiB of
# shared memory of every device; other tiles spill registers on some of them.
TILES = {
    64: Tiles(_tile(64, 64, 4, 2), _tile(64, 32, 4, 2), _tile(16, 64, 4, 3)),
    128: Tiles(_tile(64, 32, 4, 2), _tile(64, 32, 4, 3), _tile(64, 64, 8, 1)),
    256: Tiles(_tile(64, 32, 8, 2), _tile(32, 32, 4, 2), _tile(32, 32, 8, 2)),
    # Products are added up over a part of the features.
    512: Tiles(
        _tile(32, 32, 8, 2, 32), _tile(32, 32, 8, 1, 32), _tile(32, 32, 8, 1, 32)
    ),
}
# For code of 8.0 these are faster, where they are given.
TILES_80 = {
    64: Tiles(_tile(128, 64, 4, 2), _tile(64, 32, 4, 2), _tile(16, 64, 4, 3)),
    128: Tiles(_tile(128, 64, 8, 2), _tile(64, 64, 4, 2), _tile(64, 64, 8, 2)),
    512: Tiles(
        _tile(32, 32, 8, 2, 64), _tile(32, 32, 8, 2, 64), _tile(32, 32, 8, 1, 64)
    ),
}


class RowTiles(NamedTuple):
    """Places of segments and tiles in packed rows.

    Attributes:
        start: T. First row of each row's segment.
        end: T. The row after the last one of each row's segment.
        segment_ids: T. Segment of each row; negative for padding.
        tiles: For each number of rows of a tile, the first rows of all tiles,
            ascending, and their number.
    """

    start: Array
    end: Array
    segment_ids: Array
    tiles: dict[int, tuple[Array, Array]]


def triton_unsupported(*, dtype: Any, head_dim: int) -> str | None:
    """Says why Triton's kernels cannot run packed attention here; None if they can.

    Args:
        dtype: Dtype of queries, keys and values.
        head_dim: Features of a head.
    """
    if (reason := unsupported_device()) is not None:
        return reason
    if (reason := unsupported_dtype(dtype)) is not None:
        return reason
    is_small = head_dim % 8 == 0 and head_dim <= _MAX_HEAD_DIM
    if not is_small and head_dim != _WIDE_HEAD_DIM:
        return (
            f"head_dim {head_dim} is neither a multiple of 8 up to {_MAX_HEAD_DIM} nor "
            f"{_WIDE_HEAD_DIM}"
        )
    return None


def triton_attention(
    q: Float[Array, "T H E"],
    k: Float[Array, "T HK E"],
    v: Float[Array, "T HK E"],
    is_sound: Bool[Array, " T"],
    segment_ids: Int[Array, " T"],
    lengths: SegmentLengths,
    scoring: Scoring,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "T H E"]:
    """Attention as `packed_attention` defines it, for sound q, k and v.

    A row's bits depend on its own segment alone: neither on the segment's place in the
    packed rows nor on its neighbours.

    Args:
        q: Queries, bfloat16 or float16; H is a multiple of HK.
        k: Keys, in q's dtype.
        v: Values, in q's dtype.
        is_sound: Where it is false, the row's output is NaN and takes no gradient.
        segment_ids: Segment of each row; padding rows are negative and get zeros.
        lengths: Lengths of the segments, by which the number of programs is chosen.
            Any other lengths give the same result.
        scoring: Settings of the scores.
        sinks: See `packed_attention`.

    Raises:
        ValueError: q has too many elements for the kernels' offsets.
    """
    if q.size >= _MAX_ELEMENTS:
        raise ValueError(
            f"q has {q.size} elements, and the kernels' offsets are 32 bits wide. "
            "Lower microbatch_tokens, or use attention: xla."
        )
    kernels = Kernels(scoring, lengths, present_target())
    return _attention(q, k, v, is_sound, segment_ids, sinks, kernels)


class Kernels(NamedTuple):
    """Settings of all kernels of one call of attention.

    Attributes:
        scoring: Settings of the scores.
        lengths: Lengths of the segments.
        target: What the kernels are compiled for.
    """

    scoring: Scoring
    lengths: SegmentLengths
    target: Target

    def run(
        self,
        kernel: Any,
        rows: tuple[Array, ...],
        out_types: list[jax.ShapeDtypeStruct],
        tile: Tile,
        layout: RowTiles,
        *,
        is_sound: Array | None = None,
        over_keys: bool = False,
    ) -> list[Array]:
        """Runs a kernel for each head; returns its outputs.

        Args:
            kernel: The kernel.
            rows: Its first operands, which begin with q, k and v.
            out_types: Shapes and dtypes of its outputs.
            tile: How it is compiled.
            layout: Places of segments and tiles.
            is_sound: T. Its last operand, if it has one.
            over_keys: Whether its programs own tiles of keys, rather than of queries.
        """
        (t, heads, e), kv_heads = rows[0].shape, rows[1].shape[1]
        tile_rows = tile.sizes["KEYS" if over_keys else "QUERIES"]
        programs = -(-t // tile_rows) + -(-t // self.lengths.mean)
        window = self.scoring.window
        operands = (
            *rows,
            *layout.tiles[tile_rows],
            layout.start,
            layout.end,
            layout.segment_ids,
        )
        return launch(
            kernel,
            operands if is_sound is None else (*operands, is_sound),
            out_types,
            grid=(kv_heads if over_keys else heads, programs),
            tile=tile,
            target=self.target,
            constants={
                "T": t,
                "H": heads,
                "HK": kv_heads,
                "E": e,
                "EP": padded_dim(e),
                "PART": padded_dim(e),  # unless the tile has one
                "WINDOW": 0 if window is None or window >= t else window,
                "SCALE": self.scoring.scale_of(e),
                "CAP": self.scoring.softcap or 0.0,
            },
        )


def padded_dim(head_dim: int) -> int:
    """Returns the power of two of features that the kernels compute with."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tiles_of(head_dim: int, capability: int) -> Tiles:
    """Returns the tiles for heads of this size, and code of this capability."""
    table = TILES | TILES_80 if capability == 80 else TILES
    return next(tiles for most, tiles in table.items() if head_dim <= most)


def _layout(segment_ids: Int[Array, " T"], tiles: Tiles) -> RowTiles:
    start, end = segment_bounds(segment_ids)
    rows = jnp.arange(segment_ids.shape[0], dtype=jnp.int32)
    sizes = {tiles.forward.sizes["QUERIES"], tiles.queries.sizes["QUERIES"]}
    sizes.add(tiles.keys.sizes["KEYS"])
    found = {}
    for size in sorted(sizes):
        begins = (rows - start) % size == 0
        # A sort, as XLA would run a deterministic scatter one row at a time.
        firsts = jnp.sort(jnp.where(begins, rows, rows.size))
        found[size] = firsts, begins.sum(dtype=jnp.int32)[None]
    layout = RowTiles(start, end, segment_ids.astype(jnp.int32), found)
    # Without the barrier XLA could compute it for every layer.
    return jax.lax.optimization_barrier(layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(q, k, v, is_sound, segment_ids, sinks, kernels):
    return _attention_forward(q, k, v, is_sound, segment_ids, sinks, kernels)[0]


def _attention_forward(q, k, v, is_sound, segment_ids, sinks, kernels: Kernels):
    from jaxlora.pallas_kernels.triton.attention_forward import attention_forward

    tiles = tiles_of(q.shape[2], kernels.target.capability)
    layout = _layout(segment_ids, tiles)
    is_sound = is_sound.astype(jnp.int32)
    out, lse = kernels.run(
        attention_forward,
        (q, k, v),
        [
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[1::-1], jnp.float32),
        ],
        tiles.forward,
        layout,
        is_sound=is_sound,
    )
    if sinks is not None:
        # The kernels have the logarithm to base 2, with heads first.
        out, total = with_sinks(out, lse.T * math.log(2), sinks)
        lse = total.T / math.log(2)
    out, lse = checkpoint_name((out, lse), ATTENTION_RESULTS)
    return out, (q, k, v, is_sound, layout, out, lse)


def _attention_backward(kernels: Kernels, saved, dout):
    from jaxlora.pallas_kernels.triton import attention_backward

    q, k, v, is_sound, layout, out, lse = saved
    tiles = tiles_of(q.shape[2], kernels.target.capability)
    dout = jnp.where(is_sound[:, None, None] != 0, dout, 0)
    same = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    dq, delta = kernels.run(
        attention_backward.attention_query_gradient,
        (q, k, v, out, dout, lse),
        [same(q), same(lse)],
        tiles.queries,
        layout,
        is_sound=is_sound,
    )
    dk, dv = kernels.run(
        attention_backward.attention_key_gradient,
        (q, k, v, dout, lse, delta),
        [same(k), same(v)],
        tiles.keys,
        layout,
        over_keys=True,
    )
    return dq, dk, dv, None, None, None  # sinks are frozen


_attention.defvjp(_attention_forward, _attention_backward)

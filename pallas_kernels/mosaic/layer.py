"""Forward and backward of the multi-adapter LoRA linear, kernel by kernel.

Forward: shrink (s = factor dropout(x) A), expand (y = x W + s B).
Backward: shrink (ds = factor dy B'), expand (dx = dy W' + mask (ds A')), and the outer
products dA = dropout(x)' ds and dB = s' dy.

References:
    LoRAFusion, arXiv 2510.00206, section 5.1, Figures 9 to 11.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dropout import Dropout, feature_words, inverse_keep, threshold
from pallas_kernels.mosaic.device import interpret_params, num_sms, unsupported_device
from pallas_kernels.mosaic.expand import TILE_ROWS, Expand
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.mask import Mask
from pallas_kernels.mosaic.outer import Outer
from pallas_kernels.mosaic.ring import COLUMNS, ROWS, STEP, RingShape
from pallas_kernels.mosaic.routing import Blocks, blocks_of
from pallas_kernels.mosaic.shrink import Shrink
from pallas_kernels.mosaic.tuning import band_for, splits_for

MAX_RANK = 4 * STEP  # a tile holds the stages of all of its ranks


def unsupported(
    *, dtype: Any, in_features: int, out_features: int, rank: int, block_tokens: int
) -> str | None:
    """Why these kernels cannot run such a layer here, or None if they can."""
    if (reason := unsupported_device()) is not None:
        return reason
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype).name} is neither bfloat16 nor float16"
    if any(n % STEP or n < 2 * STEP for n in (in_features, out_features)):
        return (
            f"the layer's {in_features} x {out_features} features are not multiples of "
            f"{STEP}, at least {2 * STEP}"
        )
    if rank > MAX_RANK:
        return f"rank {rank} is larger than {MAX_RANK}"
    if block_tokens % ROWS:
        return f"token blocks of {block_tokens} rows are not a multiple of {ROWS}"
    return None


def _padded_rank(rank: int) -> int:
    """16, 32 or a multiple of 64: what tiles can be made of."""
    return next((r for r in (16, 32) if rank <= r), -(-rank // STEP) * STEP)


def _pad_rank(x: Array, axis: int) -> Array:
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, _padded_rank(x.shape[axis]) - x.shape[axis])
    return jnp.pad(x, pad)


def mask_operands(dropout: Dropout | None, num_features: int) -> list[Array]:
    if dropout is None:
        return []
    words = feature_words(dropout.key[:, 1], num_features)
    index = dropout.token_index.astype(jnp.uint32)
    return [dropout.key[:, 0], words, threshold(dropout.rate), index]


def _run(make_role, operands, shape, dtype, items, ring):
    return launch(
        make_role,
        operands,
        jax.ShapeDtypeStruct(shape, dtype),
        items,
        ring,
        num_sms=num_sms(),
        interpret=interpret_params(),
    )


def shrink(x, a, factor, blocks: Blocks, mask):
    """s = factor * dropout(x) A, A stored G R K; see `Shrink`."""
    r = a.shape[1]

    def make(ring, x, a, factor, slot, chunks, *rest):
        masked = Mask(*rest[:-1]) if mask else None
        return Shrink(ring, x, a, rest[-1], factor, slot, chunks, masked)

    operands = [x, a, factor, blocks.slot, blocks.chunks, *mask]
    items = blocks.slot.shape[0] * math.ceil(r / STEP)
    narrow = min(r, STEP)
    ring = RingShape.skinny(narrow, narrow, masked=bool(mask))
    return _run(make, operands, (x.shape[0], r), x.dtype, items, ring)


def expand(
    x, w, layer, s, b, blocks: Blocks, bias, mask, *, transposed: bool, band=None
):
    """y = x W + bias + mask * (s B); see `Expand`. `band`: None: the table's."""
    (t, k), n = x.shape, w.shape[1] if transposed else w.shape[2]
    band = band or band_for(_device_kind(), t, k, n)
    optional = [] if bias is None else [bias]

    def make(ring, x, w, layer, s, b, slot, chunks, *rest):
        masked = Mask(*rest[:4]) if mask else None
        bias = rest[-2] if optional else None
        about = (slot, chunks, bias, masked, transposed, band)
        return Expand(ring, x, w, layer, s, b, rest[-1], *about)

    operands = [x, w, layer, s, b, blocks.slot, blocks.chunks, *mask, *optional]
    items = math.ceil(t / TILE_ROWS) * math.ceil(n / COLUMNS)
    ring = RingShape.wide(transposed=transposed)
    return _run(make, operands, (t, n), x.dtype, items, ring)


def outer(wide, narrow, blocks: Blocks, mask, *, transposed: bool, splits=None):
    """wide' narrow for each slot; see `Outer`. `splits`: None: the table's."""
    (t, k), r, g = wide.shape, narrow.shape[1], blocks.chunks.shape[0]
    splits = splits or splits_for(_device_kind(), t, k, num_sms())
    shape = (splits, g, r, k) if transposed else (splits, g, k, r)

    def make(ring, wide, narrow, order, starts, chunks, *rest):
        masked = Mask(*rest[:-1]) if mask else None
        about = (order, starts, chunks, masked, transposed)
        return Outer(ring, wide, narrow, rest[-1], *about)

    operands = [wide, narrow, blocks.order, blocks.starts, blocks.chunks, *mask]
    items = k // STEP * splits * math.ceil(r / STEP)
    ring = RingShape.skinny(ROWS, STEP, masked=bool(mask))
    return _run(make, operands, shape, jnp.float32, items, ring).sum(axis=0)


def _device_kind() -> str:
    return (
        "interpreter"
        if interpret_params() is not None
        else jax.devices()[0].device_kind
    )


def prepared(scaling, dropout, rank, block_adapter, num_rows):
    """(factor of s, what the kernels know of the batch)."""
    factor = scaling if dropout is None else scaling * inverse_keep(dropout.rate)
    live = jnp.where(scaling == 0, 0, rank)  # a slot that is switched off costs nothing
    return factor.astype(jnp.float32), blocks_of(block_adapter, live, num_rows)


@functools.partial(jax.jit, static_argnames=("w_transposed",))
def forward(
    x: Float[Array, "T K"],
    w: Float[Array, "L _ _"],
    layer: Int[Array, " 1"],
    a: Float[Array, "G K R"],
    b: Float[Array, "G R N"],
    scaling: Float[Array, " G"],
    rank: Int[Array, " G"],
    block_adapter: Int[Array, " NB"],
    bias: Float[Array, " N"] | None,
    dropout: Dropout | None,
    *,
    w_transposed: bool = False,
) -> tuple[Float[Array, "T N"], Float[Array, "T RP"]]:
    """Returns y, and s = scaling * dropout(x) A for the backward pass.

    Of s, only what a block's own adapter fills is ever written or read.
    """
    factor, blocks = prepared(scaling, dropout, rank, block_adapter, x.shape[0])
    a, b = _pad_rank(a.astype(x.dtype), 2), _pad_rank(b.astype(x.dtype), 1)
    mask = mask_operands(dropout, -(-x.shape[1] // (2 * STEP)) * 2 * STEP)
    s = shrink(x, a.transpose(0, 2, 1), factor, blocks, mask)
    b = b.transpose(0, 2, 1) if w_transposed else b
    y = expand(x, w, layer, s, b, blocks, bias, [], transposed=w_transposed)
    return y, s


@functools.partial(jax.jit, static_argnames=("w_transposed",))
def backward(
    dy: Float[Array, "T N"],
    x: Float[Array, "T K"],
    w: Float[Array, "L _ _"],
    layer: Int[Array, " 1"],
    s: Float[Array, "T RP"],
    a: Float[Array, "G K R"],
    b: Float[Array, "G R N"],
    scaling: Float[Array, " G"],
    rank: Int[Array, " G"],
    block_adapter: Int[Array, " NB"],
    dropout: Dropout | None,
    *,
    w_transposed: bool = False,
) -> tuple[Float[Array, "T K"], Float[Array, "G K R"], Float[Array, "G R N"]]:
    """Returns dx in x's dtype, and da, db in float32."""
    factor, blocks = prepared(scaling, dropout, rank, block_adapter, x.shape[0])
    r = a.shape[2]
    a, b = _pad_rank(a.astype(x.dtype), 2), _pad_rank(b.astype(x.dtype), 1)
    mask = mask_operands(dropout, -(-x.shape[1] // COLUMNS) * COLUMNS)
    ds = shrink(dy, b, factor, blocks, [])
    right = a.transpose(0, 2, 1) if w_transposed else a
    dx = expand(
        dy, w, layer, ds, right, blocks, None, mask, transposed=not w_transposed
    )
    da = outer(x, ds, blocks, mask, transposed=False)
    db = outer(dy, s, blocks, [], transposed=True)
    return dx, da[:, :, :r], db[:, :r]

"""Which linears and row-wise functions the `mosaic` back end runs on this device."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlora.pallas_kernels.dropout import TILE_TOKENS
from jaxlora.pallas_kernels.given_mask import GivenMask
from jaxlora.pallas_kernels.mosaic import hopper
from jaxlora.pallas_kernels.operands import (
    padded_rank,
    unsupported_dtype,
    unsupported_linear,
)
from jaxlora.pallas_kernels.projection import RANK_STEP, LinearShape, Projection
from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.row_function import RowArguments, RowFunction

# In a norm's gradient, a warpgroup has at least one feature per thread, and holds three
# rows in registers, which spill with twice as many.
_LEAST_FEATURES, _MOST_FEATURES = 128, 8192
_MIN_PRODUCER_STAGES = 2


def unsupported(shape: LinearShape) -> str | None:
    """Returns why these kernels cannot run such a linear here, or None if they can."""
    if (reason := hopper.unsupported_device()) is not None:
        return reason
    if shape.weight_format != Fp8Weight.format:
        return unsupported_linear(shape, multiple=RANK_STEP, least=2 * RANK_STEP)
    if shape.dtype != jnp.bfloat16:
        name = jnp.dtype(shape.dtype).name
        return f"with fp8 weights its kernels take x in bfloat16 only, not {name}"
    # Both passes copy whole steps of 128 bytes from device memory.
    return unsupported_linear(shape, multiple=2 * RANK_STEP)


def unsupported_producer(
    function: RowFunction,
    arguments: RowArguments,
    projections: Sequence[Projection],
    *,
    is_gradient: bool,
) -> str | None:
    """See `Backend.unsupported_producer`."""
    if (reason := hopper.unsupported_device()) is not None:
        return reason
    if any(isinstance(p.w, Fp8Weight) for p in projections):
        return "the rows of linears on an fp8 base are quantized before their products"
    if (reason := unsupported_dtype(arguments.tiles[0].dtype)) is not None:
        return reason
    # These import Mosaic.
    from jaxlora.pallas_kernels.mosaic.mask import BitMask, HashMask
    from jaxlora.pallas_kernels.mosaic.produce import WIDTH
    from jaxlora.pallas_kernels.mosaic.products import producer_ring

    t, k = arguments.tiles[0].shape
    if k % WIDTH or t % TILE_TOKENS:
        wanted = f"multiples of {TILE_TOKENS} and {WIDTH}"
        return f"the {t} rows of {k} features are not {wanted}"
    dropout, mask = None if is_gradient else projections[0].dropout, None
    if dropout is not None:
        mask = (BitMask if isinstance(dropout, GivenMask) else HashMask).tiles
    rank = padded_rank(max(p.a.shape[2] for p in projections))
    ring = producer_ring(function, arguments, len(projections), rank, mask)
    if ring.num_stages < _MIN_PRODUCER_STAGES:
        return f"{len(projections)} side products of rank {rank} leave no room"
    return None


def unsupported_norm_gradient(
    h: jax.Array | jax.ShapeDtypeStruct, w: Any
) -> str | None:
    """See `Backend.unsupported_norm_gradient`."""
    if (reason := hopper.unsupported_device()) is not None:
        return reason
    if isinstance(w, Fp8Weight):
        # With the kernel, a step of Llama-3.1-8B takes 0.5 % longer.
        return "XLA finds the row maxima for fp8 while it adds up the gradients"
    if h.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the rows are {h.dtype.name}, not bfloat16, float16 or float32"
    if h.ndim != 2 or not _LEAST_FEATURES <= h.shape[1] <= _MOST_FEATURES:
        wanted = f"[T, D] with D from {_LEAST_FEATURES} to {_MOST_FEATURES}"
        return f"the rows are {list(h.shape)}, not {wanted}"
    return None

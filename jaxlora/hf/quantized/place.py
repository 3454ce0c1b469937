"""Puts the weights of quantized linears on their devices, and quantizes them there."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxlora.hf.quantized.stored import BlockWeight, StoredWeight
from jaxlora.models.base_format import BaseFormat
from jaxlora.pallas_kernels import QuantizedWeight
from jaxlora.sharding.global_arrays import put, put_converted

Place = Callable[[str, tuple[int, ...]], Sharding]


def put_linear(
    path: str,
    weight: np.ndarray | StoredWeight,
    base: BaseFormat,
    place: Place | None,
) -> tuple[dict[str, jax.Array], np.ndarray]:
    """Puts a linear's weight on its devices, in the format of the base.

    A weight that has not this format is quantized. One device does so and then passes
    the parts on. So the result has the same bits on every mesh, although some formats
    take a mean over the whole weight.

    Args:
        path: Our path of the kernel.
        weight: The weight [N, K] in arrays of the host: dense, or as it is stored.
        base: The format.
        place: Sharding of an array by its path and shape; None: JAX's default device.

    Returns:
        The arrays by our paths; and the sums of squares of the error that quantizing
        has added to a `BlockWeight`, and of that weight, else zeros.
    """
    if isinstance(weight, QuantizedWeight):
        shapes = base.shapes(weight.out_features, weight.in_features)
    else:
        values = weight.values if isinstance(weight, BlockWeight) else weight
        shapes = base.shapes(*values.shape)
    places = {
        field: None if place is None else place(f"{path}.{field}", shape.shape)
        for field, shape in shapes.items()
    }
    local = _put_whole(weight, _one_device(next(iter(places.values()))))
    squares = jnp.zeros(2)
    if not isinstance(weight, QuantizedWeight):
        local, squares = _quantized(local, base)
    arrays = base.options.complete(local.arrays)
    assert {f: (x.shape, x.dtype) for f, x in arrays.items()} == {
        f: (x.shape, x.dtype) for f, x in shapes.items()
    }
    spread = {f"{path}.{f}": _spread(x, places[f]) for f, x in arrays.items()}
    # When this returns, the buffers of the host and the dense weight are free.
    return jax.block_until_ready(spread), np.asarray(squares, np.float64)


def _put_whole(weight: np.ndarray | StoredWeight, where: Sharding | None) -> Any:
    if isinstance(weight, np.ndarray):
        return put_converted(weight, where, weight.dtype)
    return put(weight, where)


def _one_device(where: Sharding | None) -> Sharding | None:
    """Returns the first of a sharding's devices that this process can use."""
    if where is None:
        return None
    here = where.addressable_devices or jax.local_devices()
    return SingleDeviceSharding(min(here, key=lambda device: device.id))


def _spread(x: jax.Array, where: Sharding | None) -> jax.Array:
    """Divides an array of one device among the devices of a sharding."""
    if where is None:
        return x
    return put(x if where.is_fully_addressable else np.asarray(x), where)


@functools.partial(jax.jit, static_argnames="base")
def _quantized(
    weight: jax.Array | BlockWeight, base: BaseFormat
) -> tuple[QuantizedWeight, jax.Array]:
    """Quantizes a weight; also returns the two sums of `put_linear`."""
    if not isinstance(weight, BlockWeight):
        return base.options.quantize(weight), jnp.zeros(2)
    w = weight.dequantize(jnp.float32)
    quantized = base.options.quantize(w)
    error = quantized.dequantize(jnp.float32) - w
    return quantized, jnp.stack([jnp.square(error).sum(), jnp.square(w).sum()])

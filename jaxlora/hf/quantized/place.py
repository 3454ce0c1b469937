"""Puts the weights of quantized linears on their devices, and quantizes them there."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxlora.hf.quantized.stored import BlockWeight, StoredWeight
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.structure import TensorSpec
from jaxlora.pallas_kernels import QuantizedWeight, WeightOptions
from jaxlora.sharding.global_arrays import put, put_converted

Place = Callable[[str, tuple[int, ...]], Sharding]


def put_linear(
    spec: TensorSpec,
    weights: Iterable[np.ndarray | StoredWeight],
    base: BaseFormat,
    place: Place | None,
) -> tuple[dict[str, jax.Array], np.ndarray]:
    """Puts a linear's weight on its devices, in the format of the base.

    The experts of a layer come one after the other, so that no more than one of them is
    there unquantized.

    A weight that has not this format is quantized. One device does so and then passes
    the parts on. So the result has the same bits on every mesh, although some formats
    take a mean over the whole weight.

    Args:
        spec: The weight, as if it was not quantized.
        weights: The weight [N, K] in arrays of the host, dense or as it is stored; or
            that of each expert.
        base: The format.
        place: Sharding of an array by its path and shape; None: JAX's default device.

    Returns:
        The arrays by our paths; and the sums of squares of the error that quantizing
        has added to a `BlockWeight`, and of that weight, else zeros.
    """
    *first, k, n = spec.shape
    shapes, options = base.shapes(n, k, *first), base.options_of(spec.path)
    places = {
        field: None if place is None else place(f"{spec.path}.{field}", shape.shape)
        for field, shape in shapes.items()
    }
    where = _one_device(next(iter(places.values())))
    arrays, squares = {}, np.zeros(2)
    if first:
        arrays = {
            f: jnp.zeros(x.shape, x.dtype, device=where) for f, x in shapes.items()
        }
    for i, weight in enumerate(weights):
        local = _put_whole(weight, where)
        if not isinstance(weight, QuantizedWeight):
            local, added = _quantized(local, options)
            squares += np.asarray(added, np.float64)
        one = options.complete(local.arrays)
        arrays = _with_expert(arrays, one, i) if first else one
        # Now the buffers of the host and the dense weight are free.
        jax.block_until_ready(arrays)
        del weight, local
    assert {f: (x.shape, x.dtype) for f, x in arrays.items()} == {
        f: (x.shape, x.dtype) for f, x in shapes.items()
    }
    spread = {f"{spec.path}.{f}": _spread(x, places[f]) for f, x in arrays.items()}
    return jax.block_until_ready(spread), squares


@functools.partial(jax.jit, donate_argnums=0)
def _with_expert(
    stack: dict[str, jax.Array], one: dict[str, jax.Array], index: int | jax.Array
) -> dict[str, jax.Array]:
    """Writes the arrays of an expert's weight into those of all experts."""
    return {field: x.at[index].set(one[field]) for field, x in stack.items()}


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


@functools.partial(jax.jit, static_argnames="options")
def _quantized(
    weight: jax.Array | BlockWeight, options: WeightOptions
) -> tuple[QuantizedWeight, jax.Array]:
    """Quantizes a weight; also returns the two sums of `put_linear`."""
    if not isinstance(weight, BlockWeight):
        return options.quantize(weight), jnp.zeros(2)
    w = weight.dequantize(jnp.float32)
    quantized = options.quantize(w)
    error = quantized.dequantize(jnp.float32) - w
    return quantized, jnp.stack([jnp.square(error).sum(), jnp.square(w).sum()])

"""Puts the weights of quantized linears on their devices, and quantizes them there."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxlora.hf.quantized.block_weight import BlockWeight
from jaxlora.hf.quantized.layout import StoredWeight
from jaxlora.models.base_format import BaseFormat
from jaxlora.pallas_kernels import FORMATS, Fp8Weight, QuantizedWeight
from jaxlora.sharding.global_arrays import put

Place = Callable[[str, tuple[int, ...]], Sharding]
Shardings = tuple[tuple[str, Sharding | None], ...]


def put_linear(
    path: str,
    weight: np.ndarray | StoredWeight,
    base: BaseFormat,
    place: Place | None,
) -> tuple[dict[str, jax.Array], np.ndarray]:
    """Puts a linear's weight on its devices, in the format of the base.

    A weight that has not this format is quantized on the devices. Its own arrays are
    freed there before this returns.

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
    shardings: Shardings = tuple(
        (field, None if place is None else place(f"{path}.{field}", shape.shape))
        for field, shape in shapes.items()
    )
    if isinstance(weight, QuantizedWeight):
        arrays, squares = _put_fields(weight, base, shardings), np.zeros(2)
    else:
        arrays, squares = _quantize(weight, base, shardings)
    arrays = jax.block_until_ready(arrays)
    found = {field: (x.shape, x.dtype) for field, x in arrays.items()}
    assert found == {field: (x.shape, x.dtype) for field, x in shapes.items()}
    return {f"{path}.{field}": x for field, x in arrays.items()}, squares


def _put_fields(
    weight: QuantizedWeight, base: BaseFormat, shardings: Shardings
) -> dict[str, jax.Array]:
    places = dict(shardings)
    arrays = {field: put(x, places[field]) for field, x in weight.arrays.items()}
    if base.transposed:
        arrays["transposed"] = _transposer(places["transposed"])(arrays["values"])
    return arrays


def _quantize(
    weight: np.ndarray | BlockWeight, base: BaseFormat, shardings: Shardings
) -> tuple[dict[str, jax.Array], np.ndarray]:
    places = dict(shardings)
    if isinstance(weight, BlockWeight):
        there: Any = BlockWeight(
            values=put(weight.values, places["values"]),
            scale=put(weight.scale, places["scale"]),
            block=weight.block,
        )
    else:
        there = put(weight, places["values"])
    arrays, squares = jax.block_until_ready(_quantizer(base, shardings)(there))
    for array in jax.tree.leaves(there):
        array.delete()
    return arrays, np.asarray(squares, np.float64)


@functools.lru_cache(maxsize=256)
def _transposer(sharding: Sharding | None) -> Any:
    return jax.jit(jnp.transpose, out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _quantizer(base: BaseFormat, shardings: Shardings) -> Any:
    """Returns the program that quantizes a weight of one shape."""
    options = {"transposed": base.transposed} if base.name == Fp8Weight.format else {}

    def run(weight: Any) -> tuple[dict[str, jax.Array], jax.Array]:
        if not isinstance(weight, BlockWeight):
            return FORMATS[base.name].quantize(weight, **options).arrays, jnp.zeros(2)
        w = weight.dequantize(jnp.float32)
        quantized = FORMATS[base.name].quantize(w, **options)
        error = quantized.dequantize(jnp.float32) - w
        squares = jnp.stack([jnp.square(error).sum(), jnp.square(w).sum()])
        return quantized.arrays, squares

    places = dict(shardings)
    # The scales are on all devices, as the sums have to be.
    replicated = places["scale"] if base.name == Fp8Weight.format else None
    return jax.jit(run, out_shardings=(places, replicated))

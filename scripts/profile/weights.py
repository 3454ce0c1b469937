"""Random weights for the training benchmarks, made on the device."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxlora.hf.load import Place
from jaxlora.models.base_format import BaseFormat, kernel_of

SCORES = 2.0  # standard deviation of the attention scores


def random_base(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    place: Place | None = None,
    base_format: BaseFormat | None = None,
) -> dict[str, jax.Array]:
    """Makes weights with realistic activations and gradients.

    Activations stay near 1. Gradients of different tokens are as different as in
    training, because a device at its power limit multiplies similar numbers faster.
    If attention scores had a standard deviation of 1, attention would be so even that
    gradients of a sample's prompt would resemble each other (mean cosine 0.2 to 0.4; a
    trained SmolLM2-135M has 0.02 to 0.12). With a standard deviation of 2 they do not.

    Args:
        shapes: Shape and dtype of each array, by path.
        place: Where each array goes, by path and shape; each device makes its own part,
            and the values do not depend on it. None: JAX's default device.
        base_format: How linears are quantized, one after the other; None: they are not.
    """
    base: dict[str, jax.Array] = {}
    for i, (path, like) in enumerate(shapes.items()):
        where = None if place is None else place(path, like.shape)
        key = jax.random.fold_in(jax.random.key(0), i)
        kernel = path.rpartition(".kernel.")[0] + ".kernel"
        if path.endswith("norm.scale"):
            base[path] = jnp.ones(like.shape, like.dtype, device=where)
        elif path.endswith(".bias"):
            base[path] = jnp.zeros(like.shape, like.dtype, device=where)
        elif path.endswith(".kernel.values"):
            assert base_format is not None
            base |= _quantized(kernel, shapes, place, base_format, key)
        elif not path.startswith(f"{kernel}."):  # else it comes with the values
            inputs = like.shape[-1 if path.startswith("embed") else -2]
            make = _normal(where)
            base[path] = make(key, _scale(path, inputs), like.shape, like.dtype)
    return base


def _scale(path: str, in_features: int) -> float:
    """Standard deviation of a weight."""
    is_score = path.endswith(("q_proj.kernel", "k_proj.kernel"))
    return in_features**-0.5 * (SCORES**0.5 if is_score else 1.0)


@functools.cache
def _normal(where: Sharding | None):
    def normal(key, scale, shape, dtype):
        return (jax.random.normal(key, shape, dtype) * scale).astype(dtype)

    return jax.jit(normal, static_argnums=(2, 3), out_shardings=where)


def _quantized(
    kernel: str,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    place: Place | None,
    base_format: BaseFormat,
    key: jax.Array,
) -> dict[str, jax.Array]:
    """Makes the arrays of a quantized linear, by path."""
    k, n = kernel_of(shapes, kernel, base_format).shape
    fields = {field: f"{kernel}.{field}" for field in base_format.shapes(n, k)}
    where = None
    if place is not None:
        where = tuple((f, place(p, shapes[p].shape)) for f, p in fields.items())
    arrays = _quantizer(base_format, where)(key, _scale(kernel, k), (n, k))
    # The next linear's unquantized weight would otherwise lie beside this one's.
    return {fields[f]: array for f, array in jax.block_until_ready(arrays).items()}


@functools.cache
def _quantizer(base_format: BaseFormat, where: tuple[tuple[str, Sharding], ...] | None):
    def quantized(key, scale, shape):
        w = jax.random.normal(key, shape, jnp.bfloat16) * scale
        return base_format.options.quantize(w).arrays

    shardings = None if where is None else dict(where)
    return jax.jit(quantized, static_argnums=(2,), out_shardings=shardings)

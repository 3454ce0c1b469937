"""Random weights for the training benchmarks, made on the device."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxlora.hf.load import Place

SCORES = 2.0  # standard deviation of the attention scores


def random_base(
    shapes: Mapping[str, jax.ShapeDtypeStruct], place: Place | None = None
) -> dict[str, jax.Array]:
    """Makes weights with realistic activations and gradients.

    Activations stay near 1. Gradients of different tokens are as different as in
    training, because a device at its power limit multiplies similar numbers faster.
    If attention scores had a standard deviation of 1, attention would be so even that
    gradients of a sample's prompt would resemble each other (mean cosine 0.2 to 0.4; a
    trained SmolLM2-135M has 0.02 to 0.12). With a standard deviation of 2 they do not.

    Args:
        shapes: Shape and dtype of each weight, by path.
        place: Where each weight goes, by path and shape; each device makes its own
            part, and the values do not depend on it. None: JAX's default device.
    """
    base = {}
    for i, (path, like) in enumerate(shapes.items()):
        where = None if place is None else place(path, like.shape)
        if path.endswith("norm.scale"):
            base[path] = jnp.ones(like.shape, like.dtype, device=where)
        elif path.endswith(".bias"):
            base[path] = jnp.zeros(like.shape, like.dtype, device=where)
        else:
            inputs = like.shape[-1 if path.startswith("embed") else -2]
            scale = inputs**-0.5
            if path.endswith(("q_proj.kernel", "k_proj.kernel")):
                scale *= SCORES**0.5
            key = jax.random.fold_in(jax.random.key(0), i)
            base[path] = _normal(where)(key, scale, like.shape, like.dtype)
    return base


@functools.cache
def _normal(where: Sharding | None):
    def normal(key, scale, shape, dtype):
        return (jax.random.normal(key, shape, dtype) * scale).astype(dtype)

    return jax.jit(normal, static_argnums=(2, 3), out_shardings=where)

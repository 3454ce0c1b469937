"""Random problems for the kernels' tests, and what runs an op both ways."""

import jax
import jax.numpy as jnp

from jaxlora.pallas_kernels import Dropout, GivenMask, dropout_keys, pack_mask


def problem(
    blocks=(2, 0, -1, 2, 1),
    *,
    k=128,
    n=320,
    ranks=(8, 3, 16, 5),
    rates=(0.0, 0.5, 0.1, 0.2),
    block=64,
    dtype=jnp.bfloat16,
    seed=0,
):
    """Makes arguments of the op with slots of mixed ranks and rates; and the ranks."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    t, g, r = block * len(blocks), len(ranks), max(ranks)
    live = jnp.arange(r) < jnp.array(ranks)[:, None]  # G R
    step = jnp.arange(g, dtype=jnp.int32) + 3
    return {
        "x": jax.random.normal(next(keys), (t, k), dtype),
        "w": (jax.random.normal(next(keys), (k, n)) * k**-0.5).astype(dtype),
        "a": jax.random.normal(next(keys), (g, k, r)) * live[:, None] * k**-0.5,
        "b": jax.random.normal(next(keys), (g, r, n)) * live[:, :, None] * 0.3,
        "scaling": jnp.linspace(0.5, 3.0, g),
        "block_adapter": jnp.array(blocks, jnp.int32),
        "bias": jax.random.normal(next(keys), (n,), dtype),
        "dropout": None
        if rates is None
        else Dropout(
            dropout_keys(jnp.arange(g), step, layer=1, projection=2),
            jnp.array(rates),
            jax.random.permutation(next(keys), t).astype(jnp.int32),
        ),
    }, jnp.array(ranks, jnp.int32)


def given_mask(p):
    """Returns the mask of a problem's dropout as the caller would give it."""
    drop, (t, k) = p["dropout"], p["x"].shape
    kept = drop.keep(jnp.maximum(p["block_adapter"], 0), (t, k)).reshape(t, k)
    return GivenMask(pack_mask(kept), drop.inverse_keep)


def weight_of(p):
    """Returns the gradient of y."""
    return jax.random.normal(jax.random.key(9), (p["x"].shape[0], p["b"].shape[2]))


def both_ways(op, p):
    """Runs an op forward and backward; returns (y, gradients of x, a and b)."""
    weight = weight_of(p)

    def forward(x, a, b):
        return op(**p | {"x": x, "a": a, "b": b})

    y, vjp = jax.vjp(forward, p["x"], p["a"], p["b"])
    return y, *vjp(weight.astype(y.dtype))

"""Plain linears with an adapter, as jaxprs of given sizes."""

import jax
import jax.numpy as jnp

BF16 = jnp.bfloat16


def shape(*sizes, dtype=BF16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def key_shape():
    return jax.eval_shape(lambda: jax.random.key(0))


def linear(x, w, a, b, key, rate):
    kept = x
    if rate:
        keep = jax.random.bernoulli(key, 1 - rate, x.shape)
        kept = jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
    return x @ w + 2 * (kept @ a) @ b


def forward(tokens=8192, k=4096, n=4096, rank=16, rate=0.1):
    """The jaxpr of the forward pass."""
    args = shape(tokens, k), shape(k, n), shape(k, rank), shape(rank, n), key_shape()
    return jax.make_jaxpr(lambda *a: linear(*a, rate))(*args)


def training(tokens=8192, k=4096, n=4096, rank=16, rate=0.1):
    """The jaxpr of the forward and backward pass, with W frozen."""

    def run(x, w, a, b, key, dy):
        y, vjp = jax.vjp(lambda x, a, b: linear(x, w, a, b, key, rate), x, a, b)
        return y, vjp(dy)

    args = shape(tokens, k), shape(k, n), shape(k, rank), shape(rank, n), key_shape()
    return jax.make_jaxpr(run)(*args, shape(tokens, n))

"""Weights on which all formats are tried."""

import functools

import jax
import jax.numpy as jnp

from jaxlora.pallas_kernels import FORMATS


def random_weight(n=48, k=192, dtype=jnp.float32, seed=0):
    """Returns a weight [N, K]: feature 3 is zero, and 5 is a million times larger."""
    w = jax.random.normal(jax.random.key(seed), (n, k)) * k**-0.5
    return w.at[3].set(0).at[5].multiply(1e6).astype(dtype)


@functools.partial(jax.jit, static_argnames=("name", "transposed", "fp8_backward"))
def quantized(name, w, **options):
    """Quantizes a weight [N, K] in one program."""
    return FORMATS[name].quantize(w, **options)


dequantized = jax.jit(lambda w: w.dequantize(jnp.float32))

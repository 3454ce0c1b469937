"""Weights on which all formats are tried."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.pallas_kernels import FORMATS


def random_weight(n=48, k=192, dtype=jnp.float32, seed=0):
    """Returns a weight [N, K]: feature 3 is zero, and 5 is a million times larger."""
    w = np.random.default_rng(seed).standard_normal((n, k), np.float32) * k**-0.5
    w[3] = 0
    w[5] *= 1e6
    return jnp.asarray(w.astype(dtype))


@functools.partial(jax.jit, static_argnames=("name", "transposed", "fp8_backward"))
def quantized(name, w, **options):
    """Quantizes a weight [N, K] in one program."""
    return FORMATS[name].quantize(w, **options)


@functools.partial(jax.jit, static_argnames="dtype")
def dequantized(w, dtype=jnp.float32):
    """Returns the weight [N, K] that a quantized one stands for, by one program."""
    return w.dequantize(dtype)

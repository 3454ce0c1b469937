"""Variants of LoRA, and frozen weights that are stored in fewer bits."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.jaxlora.fuse.forms.form import K, N, R, form

SCALE = 1.5
RNG = np.random.default_rng(5)
CODES = jnp.asarray(RNG.integers(0, 16, (K * N // 8, 8)), jnp.uint4)
TABLE = jnp.asarray(np.sort(RNG.normal(size=16)), jnp.float32)
BLOCK_SCALE = jnp.asarray(RNG.uniform(0.1, 0.2, (K * N // 8, 1)), jnp.float32)
INT8 = jnp.asarray(RNG.integers(-127, 128, (K, N)), jnp.int8)
COLUMN_SCALE = jnp.asarray(RNG.uniform(1e-3, 3e-3, (N,)), jnp.float32)
FP8 = jnp.asarray(RNG.normal(size=(K, N)), jnp.float8_e4m3fn)


@form(trained="x a b magnitude", magnitude=(N,))
def dora_as_epilogue(x, w, a, b, magnitude):
    """DoRA, arXiv 2402.09353, with its norm detached as in section 4.3."""
    norm = jnp.linalg.norm(lax.stop_gradient(w + SCALE * a @ b), axis=0)
    return (x @ w + SCALE * (x @ a) @ b) * (magnitude / norm)


@form(trained="x d e", d=(R,), e=(N,))
def vera(x, w, a, b, d, e):
    """VeRA, arXiv 2310.11454: A and B are frozen, two vectors are trained."""
    return x @ w + (((x @ a) * d) @ b) * e


@form(codes=CODES, table=TABLE, block_scale=BLOCK_SCALE)
def nf4_weight(x, codes, table, block_scale, a, b):
    w = (table[codes.astype(jnp.int32)] * block_scale).reshape(K, N)
    return x @ w + SCALE * (x @ a) @ b


@form(codes=INT8, column_scale=COLUMN_SCALE)
def int8_weight(x, codes, column_scale, a, b):
    w = codes.astype(x.dtype) * column_scale
    return x @ w + SCALE * (x @ a) @ b


@form(codes=FP8, column_scale=COLUMN_SCALE, dtype=jnp.bfloat16)
def fp8_weight(x, codes, column_scale, a, b):
    w = codes.astype(x.dtype) * column_scale.astype(x.dtype)
    return x @ w + SCALE * (x @ a.astype(x.dtype)) @ b.astype(x.dtype)


@form(trained="x b")
def frozen_a(x, w, a, b):
    """LoRA-FA, arXiv 2308.03303: A is frozen."""
    return x @ w + SCALE * (x @ lax.stop_gradient(a)) @ b


@form(trained="x w a b")
def stopped_gradient_of_w(x, w, a, b):
    return x @ lax.stop_gradient(w) + SCALE * (x @ a) @ b

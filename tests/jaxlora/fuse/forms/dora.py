"""DoRA in the ways in which libraries write it, and dropout by whole numbers."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.jaxlora.fuse.forms.form import (
    BATCH,
    TOKENS,
    G,
    K,
    N,
    R,
    T,
    form,
    near_miss,
)
from tests.jaxlora.fuse.forms.variants import COLUMN_SCALE, INT8

SCALE, KEEP, KEY = 1.5, 0.8, jax.random.key(7)
M = {"trained": "x a b m", "m": (N,)}
KEYED = {"key": KEY, "x": (BATCH, TOKENS, K)}


@form(**M)
def offset_added_to_the_base_first(x, w, a, b, m):
    base = x @ w
    return (base + (m - 1) * base) + SCALE * m * ((x @ a) @ b)


@form(**M)
def offset_subtracted_from_one(x, w, a, b, m):
    base = x @ w
    return base - (1 - m) * base + ((x @ a) @ b) * m


@form(**M)
def offset_by_another_number(x, w, a, b, m):
    base = x @ w
    return 0.25 * base + (m + -0.25) * base + m * ((x @ a) @ b)


@form(trained="x w a b m", m=())
def one_magnitude_for_all_features(x, w, a, b, m):
    base = x @ w
    return base + (m - 1) * base + m * ((x @ a) @ b)


@form(**M, x=(BATCH, TOKENS, K))
def offset_of_a_reshaped_magnitude(x, w, a, b, m):
    base, m = x @ w, m.reshape(1, 1, -1)
    return base + ((m - 1) * base + m * (SCALE * (x @ a) @ b))


@form(**M, dtype=jnp.bfloat16)
def dora_in_bfloat16(x, w, a, b, m):
    a, b, m = (v.astype(x.dtype) for v in (a, b, m))
    base = x @ w
    return base + ((m - 1) * base + m * ((x @ a) @ b) * SCALE)


@form(trained="x a b bias m", m=(N,), dtype=jnp.bfloat16)
def dora_in_bfloat16_with_a_bias(x, w, a, b, bias, m):
    a, b, m = (v.astype(x.dtype) for v in (a, b, m))
    result = x @ w + bias
    return result + ((m - 1) * (result - bias) + m * ((x @ a) @ b) * SCALE)


@form(trained="x a b bias m", m=(N,))
def bias_that_is_scaled_on_both_terms(x, w, a, b, bias, m):
    return (x @ w + bias) * m + ((x @ a) @ b) * m


@form(trained="x a b bias m", m=(N,))
def bias_behind_two_scaled_terms(x, w, a, b, bias, m):
    return m * (x @ w) + m * ((x @ a) @ b) + bias


@form(**M, codes=INT8, column_scale=COLUMN_SCALE)
def dora_of_an_int8_weight(x, codes, column_scale, a, b, m):
    base = (x @ codes.astype(x.dtype)) * column_scale
    return base + ((m - 1) * base + m * ((x @ a) @ b))


@form(trained="x a b m", m=(N,), key=KEY)
def dora_with_dropout_of_the_branch(x, w, a, b, m, key):
    kept = jax.random.bernoulli(key, KEEP, x.shape)
    base, dropped = x @ w, jnp.where(kept, x / KEEP, 0)
    return base + (m - 1) * base + m * ((dropped @ a) @ b)


@form(trained="x a b m", m=(N,), key=KEY)
def dora_of_peft_with_dropout(x, w, a, b, m, key):
    """PEFT computes the base once more, of x with dropout."""
    kept = jax.random.bernoulli(key, KEEP, x.shape)
    dropped = jnp.where(kept, x / KEEP, 0)
    return x @ w + ((m - 1) * (dropped @ w) + m * ((dropped @ a) @ b) * SCALE)


@form(trained="x a b bias m", m=(N,), w=(N, K), a=(R, K), b=(N, R))
def whole_layer_of_peft(x, w, a, b, bias, m):
    """PEFT's DoRA line by line, with torch's layouts and its detached norm."""
    lora_weight = ((jnp.eye(K) @ a.T) @ b.T).T
    norm = lax.stop_gradient(jnp.linalg.norm(w + SCALE * lora_weight, axis=1))
    scale = (m / norm).reshape(1, -1)
    result = x @ w.T + bias
    base = result - bias
    return result + ((scale - 1) * base + scale * ((x @ a.T) @ b.T) * SCALE)


@form(trained="x d e", d=(R,), e=(N,), a=(R, K + 8), b=(N + 8, R), w=(N, K))
def whole_layer_of_peft_with_vera(x, w, a, b, d, e):
    """PEFT's VeRA line by line: each layer takes a part of the matrices."""
    a, b = a[:, :K], b[:N]
    return x @ w.T + e * ((d * (x @ a.T)) @ b.T)


@form(trained="x a b c d m", m=(N,), c=(K, R), d=(R, N))
def two_branches_with_one_magnitude(x, w, a, b, c, d, m):
    base = x @ w
    return base + (m - 1) * base + m * (x @ a @ b) + m * (x @ c @ d)


@form(trained="x w a b gate", gate=(T, 1))
def gate_of_each_row_on_both_terms(x, w, a, b, gate):
    return gate * (x @ w) + gate * (x @ a @ b)


@form(trained="x w a b")
def gate_that_is_made_from_x(x, w, a, b):
    gate = jax.nn.sigmoid(x[:, :1])
    return gate * (x @ w) + gate * (x @ a @ b)


@form()
def branch_that_is_added_twice(x, w, a, b):
    branch = x @ a @ b
    return x @ w + branch + 0.5 * branch


@form(trained="x a b c d m", m=(N,), c=(K, R), d=(R, N))
def magnitude_on_one_of_two_branches(x, w, a, b, c, d, m):
    """The other branch is added behind the scaled sum."""
    return m * (x @ w) + m * (x @ a @ b) + x @ c @ d


@near_miss("added twice, with different scales", **M)
def offset_that_is_rounded(x, w, a, b, m):
    """The rounding of m - 1 is finer than that of m."""
    base = x @ w
    rounded = (m - 1).astype(jnp.bfloat16).astype(x.dtype)
    return base + rounded * base + m * ((x @ a) @ b)


@near_miss("added twice, rounded in different ways", **M)
def base_that_is_rounded_once(x, w, a, b, m):
    base = x @ w
    rounded = base.astype(jnp.bfloat16).astype(x.dtype)
    return base + (m - 1) * rounded + m * ((x @ a) @ b)


@near_miss("rounded to bfloat16", trained="x a b m", m=(N,), dtype=jnp.bfloat16)
def dora_in_bfloat16_with_a_magnitude_in_float32(x, w, a, b, m):
    """The sum is in float32: the kernels would round it."""
    base, branch = x @ w, (x @ a.astype(x.dtype)) @ b.astype(x.dtype)
    return base + ((m - 1) * base + m * branch * SCALE)


@near_miss("added twice, at different precisions", **M)
def base_at_two_precisions(x, w, a, b, m):
    base, high = x @ w, jnp.matmul(x, w, precision=lax.Precision.HIGHEST)
    low = lax.Precision.DEFAULT
    base = jnp.matmul(x, w, precision=low)
    branch = jnp.matmul(jnp.matmul(x, a, precision=low), b, precision=low)
    return base + (m - 1) * high + m * branch


@near_miss(a=(G, K, R), b=(G, R, N), m=(G, N), ids=jnp.arange(T) % G)
def magnitude_of_each_adapter(x, w, a, b, m, ids):
    s = jnp.einsum("tk,tkr->tr", x, a[ids])
    base, m = x @ w, m[ids]
    return base + (m - 1) * base + m * jnp.einsum("tr,trn->tn", s, b[ids])


# Dropout by whole numbers.


def uniform(key, x):
    return jax.random.uniform(key, x.shape, x.dtype)


@form(**KEYED)
def dropout_by_ceil(x, w, a, b, key):
    kept = jnp.ceil(uniform(key, x) - (1 - KEEP))
    return x @ w + SCALE * ((x * kept / KEEP) @ a) @ b


@form(**KEYED)
def dropout_by_round(x, w, a, b, key):
    kept = jnp.round(uniform(key, x))
    return x @ w + SCALE * ((x * kept * 2) @ a) @ b


@form(**KEYED, dtype=jnp.bfloat16)
def dropout_by_floor_in_bfloat16(x, w, a, b, key):
    a, b = a.astype(x.dtype), b.astype(x.dtype)
    kept = jnp.floor(0.75 + uniform(key, x))
    return x @ w + SCALE * ((x * kept) @ a) @ b


@form(**KEYED)
def dropout_by_a_cast_to_int(x, w, a, b, key):
    kept = (KEEP + uniform(key, x)).astype(jnp.int32).astype(x.dtype)
    return x @ w + SCALE * ((x / KEEP * kept) @ a) @ b


@form(**KEYED)
def mask_as_integers(x, w, a, b, key):
    kept = jax.random.bernoulli(key, KEEP, x.shape).astype(jnp.int8)
    return x @ w + SCALE * ((x * kept.astype(x.dtype)) @ a) @ b


@near_miss("different x", **KEYED)
def floor_of_a_number_up_to_three(x, w, a, b, key):
    kept = jnp.floor(KEEP + 2 * uniform(key, x))
    return x @ w + SCALE * ((x * kept) @ a) @ b


@near_miss("different x", **KEYED)
def floor_of_a_normal_number(x, w, a, b, key):
    kept = jnp.floor(KEEP + jax.random.normal(key, x.shape))
    return x @ w + SCALE * ((x * kept) @ a) @ b


@near_miss("different x", kept=(T, K))
def floor_of_an_argument(x, w, a, b, kept):
    return x @ w + SCALE * ((x * jnp.floor(kept)) @ a) @ b

"""Functions with roundings and dtypes that are easily lost."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.jaxlora.fuse.forms.careful import careful
from tests.jaxlora.fuse.forms.form import G, K, N, R, T, random_array

SCALE = 1.75
TABLES = {"a": (G, K, R), "b": (G, R, N)}
INSIDE = np.random.default_rng(2).integers(0, G, T)
KEY = jax.random.key(5)


def _chosen(x, w, a, b):
    s = jnp.einsum("tk,tkr->tr", x, a)
    return x @ w + SCALE * jnp.einsum("tr,trn->tn", s, b)


def to_bfloat16_and_back(value):
    return value.astype(jnp.bfloat16).astype(value.dtype)


@careful()
def s_rounded(x, w, a, b):
    return x @ w + SCALE * (to_bfloat16_and_back(x @ a) @ b)


@careful()
def base_rounded(x, w, a, b):
    return to_bfloat16_and_back(x @ w) + SCALE * (x @ a @ b)


@careful()
def branch_rounded(x, w, a, b):
    return x @ w + to_bfloat16_and_back(SCALE * (x @ a @ b))


@careful()
def branch_rounded_before_its_scale(x, w, a, b):
    return x @ w + SCALE * to_bfloat16_and_back(x @ a @ b)


@careful()
def sum_rounded(x, w, a, b):
    return to_bfloat16_and_back(x @ w + SCALE * (x @ a @ b))


@careful(bias=1000 * random_array("bias", (N,)))
def sum_rounded_before_the_bias(x, w, a, b, bias):
    return to_bfloat16_and_back(x @ w + SCALE * (x @ a @ b)) + bias


@careful(bias=1000 * random_array("bias", (N,)))
def base_rounded_with_its_bias(x, w, a, b, bias):
    return to_bfloat16_and_back(x @ w + bias) + SCALE * (x @ a @ b)


@careful(
    dtype=jnp.bfloat16,
    bias=3 * random_array("bias", (N,)),
    columns=2 + random_array("columns", (N,)),
)
def bias_scaled_with_a_rounded_base(x, w, a, b, bias, columns):
    base = (x @ w).astype(jnp.float32) + bias
    branch = (x @ a @ b).astype(jnp.float32)
    return (base * columns + branch * columns).astype(x.dtype)


@careful()
def everything_rounded(x, w, a, b):
    s, base = to_bfloat16_and_back(x @ a), to_bfloat16_and_back(x @ w)
    return to_bfloat16_and_back(base + to_bfloat16_and_back(s @ b))


@careful()
def s_rounded_to_float16(x, w, a, b):
    return x @ w + SCALE * ((x @ a).astype(jnp.float16).astype(x.dtype) @ b)


@careful()
def s_of_reduced_precision(x, w, a, b):
    s = lax.reduce_precision(x @ a, exponent_bits=8, mantissa_bits=7)
    return x @ w + SCALE * (s @ b)


@careful()
def s_in_float8(x, w, a, b):
    s = (x @ a).astype(jnp.float8_e4m3fn).astype(x.dtype)
    return x @ w + SCALE * (s @ b)


@careful()
def products_returned_in_bfloat16(x, w, a, b):
    dot = lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.bfloat16)
    return (dot(x, w) + SCALE * dot(dot(x, a).astype(x.dtype), b)).astype(x.dtype)


@careful()
def scaled_s_rounded(x, w, a, b):
    return x @ w + to_bfloat16_and_back((x @ a) * SCALE) @ b


@careful()
def delta_of_the_weight_rounded(x, w, a, b):
    return x @ (w + to_bfloat16_and_back(a @ b))


@careful()
def merged_weight_rounded(x, w, a, b):
    return x @ to_bfloat16_and_back(w + a @ b)


@careful(key=KEY)
def dropped_x_rounded(x, w, a, b, key):
    dropped = jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0)
    return x @ w + to_bfloat16_and_back(dropped) @ a @ b


# Some values have another dtype.


@careful(dtype=jnp.bfloat16, bias=1000 * random_array("bias", (N,)))
def bias_in_float32_after_a_bfloat16_sum(x, w, a, b, bias):
    return (x @ w + (x @ a) @ b).astype(jnp.float32) + bias


@careful(dtype=jnp.bfloat16, bias=1000 * random_array("bias", (N,)))
def bias_in_float32_before_a_bfloat16_branch(x, w, a, b, bias):
    return (x @ w).astype(jnp.float32) + bias + (x @ a) @ b


@careful(dtype=jnp.float16, bias=random_array("bias", (N,), jnp.bfloat16))
def bias_of_another_half_precision(x, w, a, b, bias):
    return x @ w + (x @ a) @ b + bias


@careful(bias=np.arange(N) * 1001)
def bias_of_integers(x, w, a, b, bias):
    return x @ w + (x @ a) @ b + bias


@careful(dtype=jnp.bfloat16, scale=jnp.float32(1 / 3))
def scale_in_float32_of_a_bfloat16_branch(x, w, a, b, scale):
    return x @ w + scale * ((x @ a) @ b)


@careful(dtype=jnp.bfloat16, **TABLES, ids=INSIDE, scale=random_array("s", (G,)))
def scale_of_adapters_in_float32(x, w, a, b, ids, scale):
    s = jnp.einsum("tk,tkr->tr", x, a[ids])
    branch = jnp.einsum("tr,trn->tn", s, b[ids]).astype(jnp.float32)
    return x @ w + (scale[ids][:, None] * branch).astype(x.dtype)


@careful(dtype=jnp.bfloat16)
def sum_in_float32_of_bfloat16_products(x, w, a, b):
    return (x @ w).astype(jnp.float32) + ((x @ a) @ b).astype(jnp.float32)


@careful(x64=True, dtype=np.float64)
def float64(x, w, a, b):
    return x @ w + SCALE * (x @ a) @ b


@careful(x64=True, dtype=np.float64)
def float64_with_a_float32_branch(x, w, a, b):
    half = lambda v: v.astype(np.float32)
    return x @ w + SCALE * ((half(x) @ half(a)) @ half(b)).astype(np.float64)


@careful(x64=True, dtype=np.float64)
def float64_with_a_float32_base(x, w, a, b):
    base = x.astype(np.float32) @ w.astype(np.float32)
    return base + SCALE * (x @ a) @ b


@careful(x64=True)
def float32_summed_in_float64(x, w, a, b):
    dot = lambda x, w: jnp.dot(x, w, preferred_element_type=np.float64)
    return dot(x, w) + dot(dot(x, a), b.astype(np.float64))


@careful(x64=True, bias=1e6 * np.random.default_rng(3).normal(size=N))
def float64_bias_of_float32(x, w, a, b, bias):
    return x @ w + (x @ a) @ b + bias


@careful(x64=True, **TABLES, ids=INSIDE)
def float32_under_x64(x, w, a, b, ids):
    return _chosen(x, w, a[ids], b[ids])

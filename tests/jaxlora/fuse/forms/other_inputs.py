"""Near misses: base and branch read different inputs, masks or dtypes."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.jaxlora.fuse.forms.form import BATCH, TOKENS, K, N, R, T, form, near_miss

SCALE = 1.75
KEY = jax.random.key(9)
KEEP = 0.8


@near_miss("different x", x=(T + 1, K))
def branch_reads_a_shifted_slice(x, w, a, b):
    return x[1:] @ w + (x[:-1] @ a) @ b


@near_miss("different x")
def branch_reads_a_row_shifted_by_padding(x, w, a, b):
    return x @ w + (jnp.concatenate([jnp.zeros((1, K)), x[:-1]]) @ a) @ b


@near_miss("different x")
def branch_reads_sums_of_rows(x, w, a, b):
    return x @ w + (jnp.cumsum(x, axis=0) @ a) @ b


@near_miss("different x", x=(BATCH, TOKENS, K))
def branch_reads_the_sequences_in_reverse(x, w, a, b):
    return x @ w + (x[::-1] @ a) @ b


@near_miss("another axis", x=(4, 4, K))
def branch_swaps_sequences_and_tokens(x, w, a, b):
    return x @ w + (x.transpose(1, 0, 2) @ a) @ b


@near_miss("another axis", x=(4, 4, K))
def branch_result_swaps_sequences_and_tokens(x, w, a, b):
    return x @ w + ((x @ a) @ b).transpose(1, 0, 2)


@near_miss("different x", scale=(K,))
def branch_reads_scaled_features(x, w, a, b, scale):
    return x @ w + ((x * scale) @ a) @ b


@near_miss("different x")
def branch_reads_x_rounded_to_bfloat16_and_back(x, w, a, b):
    return x @ w + (x.astype(jnp.bfloat16).astype(x.dtype) @ a) @ b


@near_miss("different x")
def branch_reads_attention_rounded_and_back(x, w, a, b):
    mixed = jax.nn.softmax(x @ x.T) @ jnp.sin(x)
    rounded = mixed.astype(jnp.bfloat16).astype(x.dtype)
    return mixed @ w + (rounded @ a) @ b


@near_miss("different x")
def branch_reads_x_in_float8(x, w, a, b):
    return x @ w + (x.astype(jnp.float8_e4m3fn).astype(x.dtype) @ a) @ b


@near_miss()
def base_in_int8(x, w, a, b):
    def quantised(value, scale):
        return jnp.clip(jnp.round(value * scale), -127, 127).astype(jnp.int8)

    y = lax.dot(quantised(x, 16), quantised(w, 64), preferred_element_type=jnp.int32)
    return y.astype(x.dtype) / 1024 + (x @ a) @ b


@near_miss("sum is kept in float32", dtype=jnp.bfloat16)
def sum_kept_in_float32(x, w, a, b):
    def dot(x, y):
        y = y.astype(jnp.bfloat16)
        return jnp.dot(x, y, preferred_element_type=jnp.float32)

    return dot(x, w) + dot(dot(x, a).astype(jnp.bfloat16), b)


@near_miss(w=(1, 1, 8, 24), x=(4, 9, 9, 8), a=(1, 1, 8, 2), b=(2, 24))
def convolutions_with_one_tap(x, w, a, b):
    def convolve(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    return convolve(x, w) + convolve(x, a) @ b


@near_miss("weights are the input")
def scale_is_the_mean_of_x(x, w, a, b):
    return x @ w + jnp.mean(x) * (x @ a) @ b


@form()
def base_counted_twice(x, w, a, b):
    return 2 * (x @ w) + x @ a @ b


@near_miss("is not small", a=(K, T), b=(T, N))
def rank_is_the_number_of_tokens(x, w, a, b):
    return x @ w + (x @ a) @ b


@near_miss("mask", key=KEY)
def dropout_of_a(x, w, a, b, key):
    return x @ w + x @ jnp.where(jax.random.bernoulli(key, KEEP, (K, R)), a, 0) @ b


@near_miss("mask", key=KEY)
def dropout_of_b(x, w, a, b, key):
    return x @ w + x @ a @ jnp.where(jax.random.bernoulli(key, KEEP, (R, N)), b, 0)


@near_miss("different x", keys=lambda: jax.random.split(KEY, 2))
def base_and_branch_with_masks_of_their_own(x, w, a, b, keys):
    first, second = (jax.random.bernoulli(key, KEEP, x.shape) for key in keys)
    return jnp.where(first, x, 0) @ w + jnp.where(second, x, 0) @ a @ b


@near_miss("several masks", keys=lambda: jax.random.split(KEY, 2))
def masks_of_elements_and_of_rows(x, w, a, b, keys):
    elements = jax.random.bernoulli(keys[0], KEEP, x.shape)
    rows = jax.random.bernoulli(keys[1], KEEP, (T, 1))
    return x @ w + jnp.where(rows, jnp.where(elements, x, 0), 0) @ a @ b


@near_miss("stop_gradient is applied to its frozen product", trained="x w a b")
def gradient_of_the_base_stopped(x, w, a, b):
    return lax.stop_gradient(x @ w) + (x @ a) @ b


@near_miss("stop_gradient is applied to its branch", trained="x w a b")
def gradient_of_the_branch_stopped(x, w, a, b):
    return x @ w + lax.stop_gradient((x @ a) @ b)


@near_miss("different x", trained="x w a b")
def gradient_stopped_before_the_base(x, w, a, b):
    return lax.stop_gradient(x) @ w + (x @ a) @ b

"""Functions that may be fused or left alone, if only their values are kept.

Each has something that is easily lost: a rounding, a dtype, a precision, what an id
outside of a table reads, or an empty dimension.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.jaxlora.fuse.forms.form import SHAPES, G, K, N, R, T, random_array

SCALE = 1.75
TABLES = {"a": (G, K, R), "b": (G, R, N)}
MANY = {"a": (200, K, R), "b": (200, R, N)}
OUTSIDE = np.random.default_rng(1).integers(-G - 2, G + 3, T)
INSIDE = np.random.default_rng(2).integers(0, G, T)
KEY = jax.random.key(5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Careful:
    """A function, and its arguments.

    Attributes:
        function: The function of arrays.
        given: Arguments, or shapes of arguments that are drawn.
        dtype: Dtype of the arguments that are drawn.
        x64: Whether 64-bit types are enabled.
    """

    function: Callable[..., Any]
    given: dict[str, Any]
    dtype: Any
    x64: bool

    def arguments(self) -> dict[str, Any]:
        names = inspect.signature(self.function).parameters
        return {name: self._argument(name) for name in names}

    def _argument(self, name: str) -> Any:
        given = self.given.get(name, SHAPES.get(name))
        if isinstance(given, tuple):
            return random_array(name, given, self.dtype)
        return given if isinstance(given, jax.Array) else jnp.asarray(given)


CAREFUL: dict[str, Careful] = {}


def careful(*, dtype: Any = jnp.float32, x64: bool = False, **given: Any):
    """Registers a function whose values must be kept.

    Args:
        dtype: Dtype of the arguments that are drawn.
        x64: Whether 64-bit types are enabled.
        **given: Arguments, or shapes of arguments that are drawn.
    """

    def register(function):
        assert function.__name__ not in CAREFUL, function.__name__
        made = Careful(function=function, given=given, dtype=dtype, x64=x64)
        CAREFUL[function.__name__] = made
        return function

    return register


def _chosen(x, w, a, b):
    s = jnp.einsum("tk,tkr->tr", x, a)
    return x @ w + SCALE * jnp.einsum("tr,trn->tn", s, b)


def to_bfloat16_and_back(value):
    return value.astype(jnp.bfloat16).astype(value.dtype)


# What an id outside of the table reads.


@careful(**TABLES, ids=OUTSIDE)
def filled_with_zeros(x, w, a, b, ids):
    entry = lambda table: table.at[ids].get(mode="fill", fill_value=0)
    return _chosen(x, w, entry(a), entry(b))


@careful(**TABLES, ids=OUTSIDE)
def filled_with_nan(x, w, a, b, ids):
    entry = lambda table: table.at[ids].get(mode="fill", fill_value=jnp.nan)
    return _chosen(x, w, entry(a), entry(b))


@careful(**TABLES, ids=OUTSIDE)
def filled_with_ones(x, w, a, b, ids):
    entry = lambda table: table.at[ids].get(mode="fill", fill_value=1)
    return _chosen(x, w, entry(a), entry(b))


@careful(**TABLES, ids=OUTSIDE)
def filled_by_default(x, w, a, b, ids):
    entry = lambda table: table.at[ids].get(mode="fill")
    return _chosen(x, w, entry(a), entry(b))


@careful(**TABLES, ids=OUTSIDE)
def dropped_outside(x, w, a, b, ids):
    entry = lambda table: table.at[ids].get(mode="drop", fill_value=0)
    return _chosen(x, w, entry(a), entry(b))


@careful(**TABLES, ids=OUTSIDE)
def only_a_is_filled(x, w, a, b, ids):
    a = a.at[ids].get(mode="fill", fill_value=0)
    return _chosen(x, w, a, b.at[ids].get(mode="clip"))


@careful(**TABLES, ids=OUTSIDE)
def clipped(x, w, a, b, ids):
    entry = lambda table: table.at[ids].get(mode="clip")
    return _chosen(x, w, entry(a), entry(b))


@careful(**TABLES, ids=OUTSIDE)
def taken_and_filled_with_zeros(x, w, a, b, ids):
    entry = lambda table: jnp.take(table, ids, axis=0, mode="fill", fill_value=0)
    return _chosen(x, w, entry(a), entry(b))


@careful(**TABLES, ids=OUTSIDE)
def taken_by_default(x, w, a, b, ids):
    return _chosen(x, w, jnp.take(a, ids, axis=0), jnp.take(b, ids, axis=0))


@careful(**TABLES, ids=OUTSIDE)
def taken_and_wrapped(x, w, a, b, ids):
    entry = lambda table: jnp.take(table, ids, axis=0, mode="wrap")
    return _chosen(x, w, entry(a), entry(b))


@careful(x=(4, 9, K), **TABLES, ids=[2, -1, 7, 0])
def sequences_filled_with_zeros(x, w, a, b, ids):
    entry = lambda table: table.at[ids].get(mode="fill", fill_value=0)
    return x @ w + SCALE * (x @ entry(a)) @ entry(b)


@careful(**TABLES, ids=7)
def one_entry_filled_with_zeros(x, w, a, b, ids):
    entry = lambda table: table.at[ids].get(mode="fill", fill_value=0)
    return x @ w + SCALE * (x @ entry(a)) @ entry(b)


@careful(**TABLES, ids=OUTSIDE, scale=(G,))
def scale_filled_with_zeros(x, w, a, b, ids, scale):
    inside = jnp.clip(ids, 0, G - 1)
    s = jnp.einsum("tk,tkr->tr", x, a[inside])
    branch = jnp.einsum("tr,trn->tn", s, b[inside])
    chosen = scale.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return x @ w + chosen[:, None] * branch


@careful(**MANY, ids=np.arange(T).astype(np.int8) - 18)
def take_by_int8_of_200(x, w, a, b, ids):
    return _chosen(x, w, jnp.take(a, ids, axis=0), jnp.take(b, ids, axis=0))


@careful(**MANY, ids=(np.arange(T) * 7 % 200).astype(np.uint8))
def gather_by_uint8_of_200(x, w, a, b, ids):
    return _chosen(x, w, a[ids], b[ids])


@careful(**TABLES, ids=OUTSIDE + 0.5 * (np.arange(T) % 2))
def one_hot_of_floats(x, w, a, b, ids):
    """No entry is 0.5, so every second row has no adapter."""
    chosen = jax.nn.one_hot(ids, G)
    s = jnp.einsum("tk,gkr,tg->tr", x, a, chosen)
    return x @ w + jnp.einsum("tr,grn,tg->tn", s, b, chosen)


@careful(**TABLES, ids=OUTSIDE)
def one_hot_outside(x, w, a, b, ids):
    chosen = jax.nn.one_hot(ids, G)
    s = jnp.einsum("tk,gkr,tg->tr", x, a, chosen)
    return x @ w + jnp.einsum("tr,grn,tg->tn", s, b, chosen)


@careful(**TABLES, ids=(INSIDE + 256).astype(np.int32))
def one_hot_of_ids_that_are_cast(x, w, a, b, ids):
    """The cast takes 256 to 0."""
    chosen = jax.nn.one_hot(ids.astype(jnp.uint8), G)
    s = jnp.einsum("tk,gkr,tg->tr", x, a, chosen)
    return x @ w + jnp.einsum("tr,grn,tg->tn", s, b, chosen)


@careful(**TABLES, sizes=np.array([11, 0, 20], np.int32))
def ragged_dot_that_leaves_rows(x, w, a, b, sizes):
    return x @ w + lax.ragged_dot(lax.ragged_dot(x, a, sizes), b, sizes)


# What rounds.


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


# What has another dtype.


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


# What is empty.


@careful(x=(0, K))
def no_rows(x, w, a, b):
    return x @ w + SCALE * (x @ a) @ b


@careful(x=(3, 0, K))
def no_rows_in_each_sequence(x, w, a, b):
    return x @ w + SCALE * (x @ a) @ b


@careful(w=(K, 0), b=(R, 0), bias=(0,))
def no_output_features(x, w, a, b, bias):
    return x @ w + SCALE * (x @ a) @ b + bias


@careful(x=(T, 0), w=(0, N), a=(0, R))
def no_input_features(x, w, a, b):
    return x @ w + SCALE * (x @ a) @ b


@careful(a=(K, 0), b=(0, N))
def rank_zero(x, w, a, b):
    return x @ w + SCALE * (x @ a) @ b


@careful(a=(0, K, R), b=(0, R, N), ids=INSIDE)
def no_adapters(x, w, a, b, ids):
    chosen = jax.nn.one_hot(ids, 0)
    s = jnp.einsum("tk,gkr,tg->tr", x, a, chosen)
    return x @ w + jnp.einsum("tr,grn,tg->tn", s, b, chosen)


@careful(a=(0, K, R), b=(0, R, N))
def ragged_dot_without_adapters(x, w, a, b):
    sizes = jnp.zeros(0, jnp.int32)
    return x @ w + lax.ragged_dot(lax.ragged_dot(x, a, sizes), b, sizes)


@careful(x=(0, K), **TABLES, ids=np.zeros(0, np.int32))
def no_rows_that_choose(x, w, a, b, ids):
    return _chosen(x, w, a[ids], b[ids])


# What looks like dropout, or has a further reader.


@careful(key=KEY)
def mask_that_doubles(x, w, a, b, key):
    """No element is dropped: those that are not kept count half."""
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return x @ w + jnp.where(kept, x, x / 2) @ a @ b


@careful(key=KEY)
def mask_of_three_values(x, w, a, b, key):
    mask = jax.random.randint(key, x.shape, 0, 3).astype(x.dtype)
    return x @ w + (x * mask) @ a @ b


@careful(x=random_array("x", (T, K)).at[3].set(jnp.nan), key=KEY)
def dropout_of_nan_by_selection(x, w, a, b, key):
    kept = jax.random.bernoulli(key, 0.75, x.shape)
    return x @ w + jnp.where(kept, x / 0.75, 0) @ a @ b


@careful()
def residual_beside_a_sum_of_features(x, w, a, b):
    return x @ w + (x @ a) @ b + jnp.sum(x, axis=-1, keepdims=True)


@careful()
def branch_added_twice(x, w, a, b):
    branch = (x @ a) @ b
    return x @ w + branch + branch


@careful()
def two_different_scales(x, w, a, b):
    s = x @ a
    return x @ w + 2.0 * (s @ b) - 0.5 * (s @ b)

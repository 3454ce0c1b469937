"""Functions with empty dimensions, and with masks and sums that are not dropout."""

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

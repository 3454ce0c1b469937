"""Functions in which rows choose adapters by ids that are easily misread."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.jaxlora.fuse.forms.careful import careful
from tests.jaxlora.fuse.forms.form import G, K, N, R, T

SCALE = 1.75
TABLES = {"a": (G, K, R), "b": (G, R, N)}
MANY = {"a": (200, K, R), "b": (200, R, N)}
OUTSIDE = np.random.default_rng(1).integers(-G - 2, G + 3, T)
INSIDE = np.random.default_rng(2).integers(0, G, T)


def _chosen(x, w, a, b):
    s = jnp.einsum("tk,tkr->tr", x, a)
    return x @ w + SCALE * jnp.einsum("tr,trn->tn", s, b)


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

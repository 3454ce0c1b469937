"""Each row has one of several adapters, chosen in the ways that people write."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.jaxlora.fuse.forms.form import BATCH, TOKENS, G, K, N, R, T, form

SCALE = 1.5
TABLES = {"a": (G, K, R), "b": (G, R, N)}
SIZES = (11, 0, 26)  # rows of each adapter; they sum to T
ADAPTER_OF_ROW = jnp.asarray(np.random.default_rng(0).integers(0, G, T))
ADAPTER_OF_SEQUENCE = jnp.array([2, 0, 2])


@form(**TABLES, adapter=ADAPTER_OF_ROW)
def gather_for_each_row(x, w, a, b, adapter):
    s = jnp.einsum("tk,tkr->tr", x, a[adapter])
    return x @ w + SCALE * jnp.einsum("tr,trn->tn", s, b[adapter])


@form(**TABLES, x=(BATCH, TOKENS, K), adapter=ADAPTER_OF_SEQUENCE)
def gather_for_each_sequence(x, w, a, b, adapter):
    return x @ w + SCALE * (x @ a[adapter]) @ b[adapter]


@form(
    **TABLES,
    x=(BATCH, TOKENS, K),
    adapter=ADAPTER_OF_SEQUENCE,
    scale=jnp.array([0.5, 1.0, 2.0]),
)
def gather_with_a_scale_for_each_adapter(x, w, a, b, adapter, scale):
    delta = (x @ a[adapter]) @ b[adapter]
    return x @ w + scale[adapter][:, None, None] * delta


@form(**TABLES, adapter=jnp.int32(2))
def gather_of_one(x, w, a, b, adapter):
    return x @ w + SCALE * (x @ a[adapter]) @ b[adapter]


@form(**TABLES, adapter=ADAPTER_OF_ROW)
def one_hot_einsum(x, w, a, b, adapter):
    chosen = jax.nn.one_hot(adapter, G, dtype=x.dtype)
    s = jnp.einsum("tk,gkr,tg->tr", x, a, chosen)
    return x @ w + SCALE * jnp.einsum("tr,grn,tg->tn", s, b, chosen)


@form(**TABLES, x=(BATCH, TOKENS, K), adapter=ADAPTER_OF_SEQUENCE)
def one_hot_of_tables(x, w, a, b, adapter):
    chosen = jax.nn.one_hot(adapter, G, dtype=x.dtype)
    a = jnp.einsum("bg,gkr->bkr", chosen, a)
    b = jnp.einsum("bg,grn->brn", chosen, b)
    return x @ w + SCALE * (x @ a) @ b


@form(**TABLES, sizes=jnp.array(SIZES, jnp.int32))
def ragged_dot(x, w, a, b, sizes):
    s = lax.ragged_dot(x, a, sizes)
    return x @ w + SCALE * lax.ragged_dot(s, b, sizes)


@form(a=(BATCH, K, R), b=(BATCH, R, N), x=(BATCH, TOKENS, K))
def vmap_over_adapters(x, w, a, b):
    def one(x, a, b):
        return x @ w + SCALE * (x @ a) @ b

    return jax.vmap(one)(x, a, b)


@form(**TABLES, x=(BATCH, TOKENS, K), adapter=ADAPTER_OF_SEQUENCE)
def vmap_over_chosen_adapters(x, w, a, b, adapter):
    def one(x, adapter):
        return x @ w + SCALE * (x @ a[adapter]) @ b[adapter]

    return jax.vmap(one)(x, adapter)


@form(**TABLES, x=(BATCH, TOKENS, K), adapter=ADAPTER_OF_SEQUENCE)
def take_of_tables(x, w, a, b, adapter):
    a, b = jnp.take(a, adapter, axis=0), jnp.take(b, adapter, axis=0)
    s = jnp.einsum("btk,bkr->btr", x, a)
    return x @ w + jnp.einsum("btr,brn->btn", s, b)

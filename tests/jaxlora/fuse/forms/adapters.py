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


@form(**TABLES)
def slices_concatenated(x, w, a, b):
    ends = np.cumsum(SIZES)
    rows = zip(ends - SIZES, ends, range(G), strict=True)
    deltas = [x[i:j] @ a[g] @ b[g] for i, j, g in rows if i < j]
    return x @ w + SCALE * jnp.concatenate(deltas)


@form(**TABLES, x=(96, K))
def blocks_of_rows_split(x, w, a, b):
    """The segments are whole blocks of 32 rows, so that no row is moved."""
    parts = jnp.split(x, (32, 64))
    deltas = [part @ a[g] @ b[g] for g, part in enumerate(parts)]
    return x @ w + SCALE * jnp.concatenate(deltas)


@form(**TABLES, x=(BATCH, TOKENS, K), scale=jnp.float32(0.7))
def slices_of_each_sequence_with_own_scales(x, w, a, b, scale):
    first = scale * (x[:, :5] @ a[0] @ b[0])
    second = 2 * scale * (x[:, 5:] @ a[1] @ b[1])
    return x @ w + jnp.concatenate([first, second], axis=1)


@form(**TABLES)
def one_segment_without_an_adapter(x, w, a, b):
    first, last = x[:10] @ a[0] @ b[0], x[20:] @ a[1] @ b[1]
    return x @ w + jnp.concatenate([first, jnp.zeros((10, N)), last])


@form(**TABLES, keys=jax.random.split(jax.random.key(1), 2))
def own_mask_of_each_segment(x, w, a, b, keys):
    def delta(x, a, b, key):
        kept = jax.random.bernoulli(key, 0.8, x.shape)
        return jnp.where(kept, x / 0.8, 0) @ a @ b

    first = delta(x[:24], a[0], b[0], keys[0])
    second = delta(x[24:], a[1], b[1], keys[1])
    return x @ w + SCALE * jnp.concatenate([first, second])


@form(**TABLES, key=jax.random.key(2), x=(BATCH, TOKENS, 4, 14))
def slices_of_dropped_attention(x, w, a, b, key):
    mixed = jax.nn.dot_product_attention(x, x, x, implementation="xla")
    mixed = mixed.reshape(BATCH * TOKENS, K)
    kept = jax.random.bernoulli(key, 0.8, mixed.shape)
    dropped = jnp.where(kept, mixed / 0.8, 0)
    deltas = [dropped[:24] @ a[0] @ b[0], dropped[24:] @ a[1] @ b[1]]
    return mixed @ w + SCALE * jnp.concatenate(deltas)

"""The branch reads x through a dropout mask that the function draws itself."""

import jax
import jax.numpy as jnp
from flax import nnx

from tests.jaxlora.fuse.forms.form import BATCH, TOKENS, K, form

KEY = jax.random.key(3)
KEEP = 0.8
SCALE = 1.25


@form(key=KEY)
def select_of_divided(x, w, a, b, key):
    kept = jax.random.bernoulli(key, KEEP, x.shape)
    return x @ w + SCALE * (jnp.where(kept, x / KEEP, 0) @ a) @ b


@form(key=KEY)
def select_then_divide(x, w, a, b, key):
    kept = jax.random.bernoulli(key, KEEP, x.shape)
    return x @ w + (jnp.where(kept, x, 0.0) / KEEP) @ a @ b


@form(key=KEY)
def select_of_dropped(x, w, a, b, key):
    dropped = jax.random.uniform(key, x.shape) >= KEEP
    return x @ w + (jnp.where(dropped, 0.0, x) @ a @ b) * (SCALE / KEEP)


@form(key=KEY)
def mask_multiplied(x, w, a, b, key):
    """Dropout as dm-haiku writes it."""
    kept = jax.random.bernoulli(key, KEEP, x.shape)
    return x @ w + SCALE * ((kept * x / KEEP) @ a) @ b


@form(key=KEY)
def mask_as_floats(x, w, a, b, key):
    mask = jax.random.bernoulli(key, KEEP, x.shape).astype(x.dtype) / KEEP
    return x @ w + SCALE * ((x * mask) @ a) @ b


@form(key=KEY, x=(BATCH, TOKENS, K))
def fold_in_and_nested_jit(x, w, a, b, key):
    @jax.jit
    def dropped(key, x):
        kept = jax.random.bernoulli(jax.random.fold_in(key, 7), KEEP, x.shape)
        return jax.lax.select(kept, x / KEEP, jnp.zeros_like(x))

    return x @ w + dropped(key, x) @ a @ b


@form(key=KEY, dtype=jnp.bfloat16)
def select_in_bfloat16(x, w, a, b, key):
    kept = jax.random.bernoulli(key, KEEP, x.shape)
    dropped = jnp.where(kept, x / KEEP, jnp.zeros_like(x))
    return x @ w + SCALE * (dropped @ a.astype(x.dtype)) @ b.astype(x.dtype)


@form(kept=jax.random.bernoulli(KEY, KEEP, (37, K)))
def mask_argument(x, w, a, b, kept):
    return x @ w + SCALE * (jnp.where(kept, x, 0) @ a) @ b


@form(key=KEY)
def flax_dropout(x, w, a, b, key):
    dropped = nnx.Dropout(1 - KEEP, deterministic=False)(x, rngs=key)
    return x @ w + SCALE * (dropped @ a) @ b


@form(key=KEY)
def merged_input_of_the_whole_linear(x, w, a, b, key):
    """Base and branch read the same dropped x, so the mask belongs to x."""
    x = jnp.where(jax.random.bernoulli(key, KEEP, x.shape), x / KEEP, 0)
    return x @ w + SCALE * (x @ a) @ b


@form(
    key=KEY,
    sites=2,
    trained="x a b a2 b2",
    w2=(K, 24),
    a2=(K, 4),
    b2=(4, 24),
)
def own_mask_of_each_projection(x, w, a, b, w2, a2, b2, key):
    def dropped(key):
        return jnp.where(jax.random.bernoulli(key, KEEP, x.shape), x / KEEP, 0)

    first, second = jax.random.split(key)
    q = x @ w + SCALE * (dropped(first) @ a) @ b
    v = x @ w2 + SCALE * (dropped(second) @ a2) @ b2
    return q, v


@form(key=KEY, x=(BATCH, TOKENS, 4, 14))
def dropout_of_attention(x, w, a, b, key):
    """The input is itself a product, and it is reshaped from heads to features."""
    mixed = jax.nn.dot_product_attention(x, x, x, implementation="xla")
    mixed = mixed.reshape(BATCH, TOKENS, K)
    kept = jax.random.bernoulli(key, KEEP, mixed.shape)
    return mixed @ w + SCALE * (jnp.where(kept, mixed / KEEP, 0) @ a) @ b


@form(key=KEY)
def mask_of_features(x, w, a, b, key):
    """All rows drop the same features."""
    kept = jax.random.bernoulli(key, KEEP, (K,))
    return x @ w + jnp.where(kept, x / KEEP, 0) @ a @ b


@form(key=KEY)
def mask_of_rows(x, w, a, b, key):
    kept = jax.random.bernoulli(key, KEEP, (x.shape[0], 1))
    return x @ w + jnp.where(kept, x / KEEP, 0) @ a @ b


@form(key=KEY)
def dropout_of_a_sum(x, w, a, b, key):
    x = x + jnp.cos(x)
    kept = jax.random.bernoulli(key, KEEP, x.shape)
    return x @ w + jnp.where(kept, x / KEEP, 0) @ a @ b

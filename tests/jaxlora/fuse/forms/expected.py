"""Forms of well-known libraries and models that a user expects to be fused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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

SCALE = 1.5
KEEP = 0.8
KEY = jax.random.key(6)
TABLES = {"a": (G, K, R), "b": (G, R, N)}
IDS = np.random.default_rng(4).integers(0, G, T)
X_BATCH = (BATCH, TOKENS, K)


@form(trained="x a b magnitude", magnitude=(N,))
def dora_of_peft(x, w, a, b, magnitude):
    """DoRA as PEFT 0.17 writes it: the base is counted once, and then (m - 1) times."""
    norm = jnp.linalg.norm(w + SCALE * (a @ b), axis=0)
    m = magnitude / lax.stop_gradient(norm)
    base = x @ w
    return base + ((m - 1) * base + m * ((x @ a) @ b) * SCALE)


@form(trained="x a b bias magnitude", magnitude=(N,))
def dora_of_peft_with_a_bias(x, w, a, b, bias, magnitude):
    """PEFT takes the bias off the base's result before it is scaled."""
    norm = jnp.linalg.norm(w + SCALE * (a @ b), axis=0)
    m = magnitude / lax.stop_gradient(norm)
    result = x @ w + bias
    return result + ((m - 1) * (result - bias) + m * ((x @ a) @ b) * SCALE)


@form(trained="x a b magnitude", magnitude=(N,), w=(N, K), a=(R, K), b=(N, R))
def dora_in_torch_layout(x, w, a, b, magnitude):
    norm = lax.stop_gradient(jnp.linalg.norm(w + SCALE * (b @ a), axis=1))
    return (magnitude / norm) * (x @ w.T + SCALE * (x @ a.T) @ b.T)


@form(codes=INT8, column_scale=COLUMN_SCALE)
def int8_weight_scaled_behind_the_product(x, codes, column_scale, a, b):
    return (x @ codes.astype(x.dtype)) * column_scale + SCALE * (x @ a) @ b


@form(codes=INT8, column_scale=COLUMN_SCALE, dtype=jnp.bfloat16)
def int8_weight_in_bfloat16_scaled_behind_the_product(x, codes, column_scale, a, b):
    half = lambda value: value.astype(x.dtype)
    base = (x @ half(codes)) * half(column_scale)
    return base + SCALE * (x @ half(a)) @ half(b)


@form(codes=INT8, column_scale=COLUMN_SCALE, bias=(N,), trained="x a b bias")
def int8_weight_scaled_behind_the_product_with_a_bias(
    x, codes, column_scale, a, b, bias
):
    base = (x @ codes.astype(x.dtype)) * column_scale + bias
    return base + SCALE * (x @ a) @ b


@form(codes=INT8, column_scale=COLUMN_SCALE, dtype=jnp.bfloat16)
def int8_weight_scaled_behind_a_product_in_float32(x, codes, column_scale, a, b):
    """The product is rounded to bfloat16 after it is scaled."""
    half = lambda value: value.astype(x.dtype)
    base = jnp.dot(x, half(codes), preferred_element_type=jnp.float32)
    base = half(base * column_scale)
    return base + SCALE * (x @ half(a)) @ half(b)


@form(codes=INT8, scale=0.002 * jnp.ones(()), trained="x a b scale")
def int8_weight_with_one_scale_behind_the_product(x, codes, scale, a, b):
    return (x @ codes.astype(x.dtype)) * scale + SCALE * (x @ a) @ b


@form(trained="x w column_scale a b", column_scale=COLUMN_SCALE)
def weight_and_scale_behind_the_product_are_trained(x, w, column_scale, a, b):
    return (x @ w) * column_scale + SCALE * (x @ a) @ b


@form(sites=2, codes=INT8, column_scale=COLUMN_SCALE, w=(K, N))
def int8_weight_scaled_behind_one_of_two_products(x, w, codes, column_scale, a, b):
    first = (x @ codes.astype(x.dtype)) * column_scale + SCALE * (x @ a) @ b
    return first, x @ w + (x @ a) @ b


@form(codes=INT8.reshape(K, 6, N // 6), column_scale=COLUMN_SCALE[: N // 6])
def int8_weight_with_one_scale_for_all_heads(x, codes, column_scale, a, b):
    base = jnp.einsum("tk,khd->thd", x, codes.astype(x.dtype)) * column_scale
    return base + (SCALE * (x @ a) @ b).reshape(base.shape)


@form(trained="x a b magnitude", magnitude=(N,))
def dora_on_both_terms(x, w, a, b, magnitude):
    m = magnitude / lax.stop_gradient(jnp.linalg.norm(w + a @ b, axis=0))
    return (x @ w) * m + ((x @ a) @ b) * m


@near_miss("computed from its input", trained="x w a b")
def product_scaled_by_a_number_made_from_x(x, w, a, b):
    return (x @ w) * jnp.tanh(jnp.mean(x)) + (x @ a) @ b


@near_miss(
    "frozen product is multiplied by an array that differs by row",
    trained="x w a b gate",
    gate=(T, 1),
)
def product_scaled_by_row(x, w, a, b, gate):
    return (x @ w) * gate + (x @ a) @ b


@form(key=KEY)
def dropout_of_equinox(x, w, a, b, key):
    return x @ w + SCALE * (eqx.nn.Dropout(1 - KEEP)(x, key=key) @ a) @ b


@form(key=KEY, dtype=jnp.bfloat16)
def dropout_of_equinox_in_bfloat16(x, w, a, b, key):
    a, b = a.astype(x.dtype), b.astype(x.dtype)
    return x @ w + SCALE * (eqx.nn.Dropout(1 - KEEP)(x, key=key) @ a) @ b


@form(key=KEY, dtype=jnp.bfloat16)
def dropout_divided_by_a_constant_in_bfloat16(x, w, a, b, key):
    """The number is computed in float32 and rounded to bfloat16."""
    a, b = a.astype(x.dtype), b.astype(x.dtype)
    keep = (1 - lax.stop_gradient(jnp.asarray(1 - KEEP))).astype(x.dtype)
    kept = jax.random.bernoulli(key, KEEP, x.shape)
    return x @ w + SCALE * (jnp.where(kept, x / keep, 0) @ a) @ b


@near_miss("different x", key=KEY, q=jnp.asarray(KEEP))
def dropout_divided_by_a_traced_number(x, w, a, b, key, q):
    kept = jax.random.bernoulli(key, KEEP, x.shape)
    return x @ w + SCALE * (jnp.where(kept, x / q, 0) @ a) @ b


@form(key=KEY)
def dropout_by_uniform_numbers(x, w, a, b, key):
    kept = jax.random.uniform(key, x.shape) < KEEP
    return x @ w + SCALE * (jnp.where(kept, x / KEEP, 0) @ a) @ b


@form(key=KEY)
def dropout_by_the_floor_of_uniform_numbers(x, w, a, b, key):
    """TensorFlow's first dropout: the floor of a number from KEEP to 1 + KEEP."""
    kept = jnp.floor(KEEP + jax.random.uniform(key, x.shape))
    return x @ w + SCALE * ((x / KEEP * kept) @ a) @ b


@form(key=KEY)
def dropout_of_uniform_numbers_multiplied(x, w, a, b, key):
    kept = (jax.random.uniform(key, x.shape) > 1 - KEEP).astype(x.dtype)
    return x @ w + SCALE * ((x * kept * (1 / KEEP)) @ a) @ b


def constrained(value, devices=1):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    spec = PartitionSpec("data", *[None] * (value.ndim - 1))
    return lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


@form(x=X_BATCH)
def sharding_constraints_of_base_and_branch(x, w, a, b):
    """MaxText constrains the result of every product."""
    branch = constrained(constrained(x @ a) @ b)
    return constrained(x @ w) + SCALE * branch


@form(x=X_BATCH)
def sharding_constraint_of_the_base(x, w, a, b):
    return constrained(x @ w) + SCALE * (x @ a) @ b


@form(x=X_BATCH)
def sharding_constraint_of_the_sum(x, w, a, b):
    return constrained(x @ w + SCALE * (x @ a) @ b)


@form(**TABLES, ids=jnp.asarray(IDS), scale=(G,), trained="x a b scale")
def scales_gathered_for_each_row(x, w, a, b, ids, scale):
    s = jnp.einsum("tk,tkr->tr", x, a[ids])
    return x @ w + scale[ids][:, None] * jnp.einsum("tr,trn->tn", s, b[ids])


@form(**TABLES, ids=jnp.asarray(IDS), scale=(G,), trained="x a b scale")
def scales_gathered_on_s(x, w, a, b, ids, scale):
    s = jnp.einsum("tk,tkr->tr", x, a[ids]) * scale[ids][:, None]
    return x @ w + jnp.einsum("tr,trn->tn", s, b[ids])


@form(**TABLES, x=X_BATCH, ids=jnp.array([2, 0, 1]), scale=(G,), trained="x a b scale")
def scales_taken_for_each_sequence(x, w, a, b, ids, scale):
    entry = lambda table: jnp.take(table, ids, axis=0, mode="clip")
    branch = (x @ entry(a)) @ entry(b)
    return x @ w + entry(scale).reshape(-1, 1, 1) * branch


@form(**TABLES, ids=jnp.asarray(IDS))
def ids_that_are_promised_to_be_inside(x, w, a, b, ids):
    entry = lambda table: table.at[ids].get(mode="promise_in_bounds")
    s = jnp.einsum("tk,tkr->tr", x, entry(a))
    return x @ w + jnp.einsum("tr,trn->tn", s, entry(b))


@form(**TABLES, ids=jnp.asarray(IDS))
def ids_that_are_clipped(x, w, a, b, ids):
    entry = lambda table: table.at[ids].get(mode="clip")
    s = jnp.einsum("tk,tkr->tr", x, entry(a))
    return x @ w + jnp.einsum("tr,trn->tn", s, entry(b))


@form(**TABLES, ids=jnp.asarray(IDS, jnp.int8))
def ids_in_int8(x, w, a, b, ids):
    s = jnp.einsum("tk,tkr->tr", x, a[ids])
    return x @ w + jnp.einsum("tr,trn->tn", s, b[ids])


@form(dtype=jnp.bfloat16, trained="x a b bias", bias=1000 * jnp.arange(1.0, N + 1))
def large_bias_in_float32_behind_the_sum(x, w, a, b, bias):
    """The linear is fused in bfloat16, and the bias is added in float32."""
    a, b = a.astype(x.dtype), b.astype(x.dtype)
    y = x @ w + SCALE * (x @ a) @ b
    return y.astype(jnp.float32) + bias


@form(dtype=jnp.bfloat16)
def sum_cast_to_float32(x, w, a, b):
    """A loss is taken in float32; the linear is in bfloat16."""
    a, b = a.astype(x.dtype), b.astype(x.dtype)
    return (x @ w + SCALE * (x @ a) @ b).astype(jnp.float32)


@form(x=(4, TOKENS, K))
def shard_map_with_checked_types(x, w, a, b):
    """`check_vma` is left at its default."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def local(x, w, a, b):
        return x @ w + SCALE * (x @ a) @ b

    specs = (rows, whole, whole, whole)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows)(x, w, a, b)


@form(x=(4, TOKENS, K), w=(K, N), trained="x w a b")
def shard_map_with_collectives(x, w, a, b):
    """W is gathered from its shards, and the results are scaled by their mean."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def local(x, w, a, b):
        w = lax.all_gather(w, "data", tiled=True)
        y = x @ w + SCALE * (x @ a) @ b
        place = 1.0 + lax.axis_index("data")
        return place * y / lax.pmean(jnp.mean(y**2), "data")

    specs = (rows, rows, whole, whole)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows)(x, w, a, b)

"""A base or a sum that is scaled or subtracted, and scales that rows choose."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.jaxlora.fuse.forms.form import BATCH, TOKENS, G, K, N, R, T, form, near_miss

SCALE = 1.75
X_BATCH = (BATCH, TOKENS, K)
M = {"trained": "x a b m", "m": (N,)}
CHOSEN = {
    "a": (G, K, R),
    "b": (G, R, N),
    "ids": jnp.asarray(np.random.default_rng(5).integers(0, G, T)),
    "scale": jnp.array([0.5, 1.5, 2.0]),
    "trained": "x a b scale",
}
BY_SEQUENCE = CHOSEN | {"x": X_BATCH, "ids": jnp.array([2, 0, 1])}
HALF = jnp.bfloat16


def linear(x, w, a, b):
    return x @ w + SCALE * (x @ a) @ b


def scaled_linear(x, w, a, b, scale):
    return x @ w + scale * (x @ a) @ b


# The base, or the whole sum, is scaled or subtracted.


@form()
def scaled_base_without_the_branch(x, w, a, b):
    return 3.0 * (x @ w) - (x @ a) @ b


@form()
def base_subtracted(x, w, a, b):
    return SCALE * (x @ a) @ b - x @ w


@form()
def both_subtracted_from_a_bias(x, w, a, b, bias):
    return bias - x @ w - (x @ a) @ b


@form()
def both_scaled_by_one_number(x, w, a, b):
    return 0.7 * (x @ w) + 0.7 * ((x @ a) @ b)


@form(trained="x a b bias")
def base_scaled_with_its_bias(x, w, a, b, bias):
    return 0.7 * (x @ w + bias) + (x @ a) @ b


@form(trained="x a b bias")
def scaled_base_with_a_bias_behind(x, w, a, b, bias):
    return (x @ w) / 8 + (x @ a) @ b + bias


@form(trained="x a b scale", scale=jnp.asarray(0.3))
def convex_sum(x, w, a, b, scale):
    return scale * (x @ w) + (1 - scale) * ((x @ a) @ b)


@form(trained="x a b scale", scale=jnp.asarray(-1.7))
def sum_scaled_by_an_argument(x, w, a, b, scale):
    return scale * (x @ w - SCALE * (x @ a) @ b)


@form(**M)
def vector_on_a_difference(x, w, a, b, m):
    return m * (2 * (x @ w) - (x @ a) @ b)


@form()
def merged_weight_subtracted(x, w, a, b):
    return x @ (0.5 * w - a @ b)


@form(dtype=HALF)
def scaled_base_in_bfloat16(x, w, a, b):
    return 3.0 * (x @ w) - (x @ a.astype(HALF)) @ b.astype(HALF)


# Scales that each row, or each sequence, chooses.


def chosen(x, a, b):
    return jnp.einsum("tr,trn->tn", jnp.einsum("tk,tkr->tr", x, a), b)


@form(**CHOSEN)
def scale_taken_with_the_default_mode(x, w, a, b, ids, scale):
    return x @ w + jnp.take(scale, ids)[:, None] * chosen(x, a[ids], b[ids])


@form(**CHOSEN)
def scale_filled_with_zeros_outside(x, w, a, b, ids, scale):
    entry = scale.at[ids].get(mode="fill", fill_value=0)
    return x @ w + entry[:, None] * chosen(x, a[ids], b[ids])


@form(**CHOSEN)
def chosen_scale_on_x(x, w, a, b, ids, scale):
    return x @ w + chosen(x * scale[ids][:, None], a[ids], b[ids])


@form(**CHOSEN)
def chosen_scale_on_a(x, w, a, b, ids, scale):
    return x @ w + chosen(x, a[ids] * scale[ids][:, None, None], b[ids])


@form(**CHOSEN)
def chosen_scale_on_b(x, w, a, b, ids, scale):
    return x @ w + chosen(x, a[ids], b[ids] * scale[ids][:, None, None])


@form(**CHOSEN)
def chosen_scale_in_an_einsum(x, w, a, b, ids, scale):
    tables = a[ids], b[ids], scale[ids]
    return x @ w + jnp.einsum("tk,tkr,trn,t->tn", x, *tables)


@form(**CHOSEN, rank=jnp.array([4.0, 2.0, 1.0]))
def chosen_alpha_over_chosen_rank(x, w, a, b, ids, scale, rank):
    ratio = SCALE * scale[ids] / jnp.sqrt(rank[ids])
    return x @ w + ratio[:, None] * chosen(x, a[ids], b[ids])


@form(**CHOSEN, alpha=jnp.array([8, 16, 32]))
def chosen_alpha_in_integers(x, w, a, b, ids, scale, alpha):
    ratio = alpha[ids] / scale[ids]
    return x @ w + ratio[:, None] * chosen(x, a[ids], b[ids])


@form(**CHOSEN)
def vmap_over_rows(x, w, a, b, ids, scale):
    def linear(x, i):
        return x @ w + scale[i] * (x @ a[i]) @ b[i]

    return jax.vmap(linear)(x, ids)


@form(**BY_SEQUENCE)
def vmap_over_sequences(x, w, a, b, ids, scale):
    def linear(x, i):
        return x @ w + jnp.exp(scale[i]) * (x @ a[i]) @ b[i]

    return jax.vmap(linear)(x, ids)


@form(**CHOSEN)
def chosen_branch_subtracted_from_a_scaled_base(x, w, a, b, ids, scale):
    return 2 * (x @ w) - scale[ids][:, None] * chosen(x, a[ids], b[ids])


# Casts between the products in bfloat16.

TRACED = {"trained": "x a b scale", "scale": jnp.asarray(1.3)}
TRACED |= {"dtype": HALF, "exact": scaled_linear}


@form(**TRACED)
def branch_scaled_in_float32(x, w, a, b, scale):
    branch = (x @ a.astype(HALF)) @ b.astype(HALF)
    return x @ w + (scale * branch.astype(jnp.float32)).astype(HALF)


@form(**TRACED)
def s_scaled_in_float32(x, w, a, b, scale):
    s = scale * jnp.dot(x, a.astype(HALF), preferred_element_type=jnp.float32)
    return x @ w + s.astype(HALF) @ b.astype(HALF)


@form(**TRACED)
def scale_cast_to_bfloat16(x, w, a, b, scale):
    return x @ w + scale.astype(HALF) * ((x @ a.astype(HALF)) @ b.astype(HALF))


@form(dtype=HALF, exact=linear)
def sums_in_float32_and_s_in_bfloat16(x, w, a, b):
    dot = lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32)
    s = dot(x, a.astype(HALF)).astype(HALF)
    return (dot(x, w) + SCALE * dot(s, b.astype(HALF))).astype(HALF)


def exact_magnitude(x, w, a, b, m):
    return m * (x @ w + SCALE * (x @ a) @ b)


@form(dtype=HALF, trained="x a b m", m=(N,), exact=exact_magnitude)
def sum_scaled_in_float32_and_rounded(x, w, a, b, m):
    dot = lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32)
    s = dot(x, a.astype(HALF)).astype(HALF)
    y = dot(x, w) + SCALE * dot(s, b.astype(HALF))
    return (m.astype(jnp.float32) * y).astype(HALF)


# DoRA with the norm of the merged weight.


def norm(weight):
    return jnp.linalg.norm(weight, axis=0)


@form(**M)
def merged_weight_with_its_norm(x, w, a, b, m):
    merged = w + SCALE * (a @ b)
    return x @ (m * merged / norm(merged))


@form(**M)
def merged_weight_divided_by_its_norm(x, w, a, b, m):
    merged = w + SCALE * (a @ b)
    return (x @ (merged / norm(merged))) * m


@form(**M)
def merged_weight_with_a_detached_norm(x, w, a, b, m):
    merged = w + SCALE * (a @ b)
    return x @ (merged * (m / lax.stop_gradient(norm(merged))))


@form(**M)
def product_of_the_merged_weight_divided(x, w, a, b, m):
    merged = w + SCALE * (a @ b)
    return (x @ merged) * m / norm(merged)


@form(**M)
def both_terms_divided_by_the_norm(x, w, a, b, m):
    size = norm(w + SCALE * (a @ b))
    return m * (x @ w) / size + m * (SCALE * (x @ a) @ b) / size


@form(**M, w=(N, K), a=(R, K), b=(N, R))
def merged_weight_in_torch_layout(x, w, a, b, m):
    merged = w + SCALE * (b @ a)
    size = jnp.sqrt(jnp.sum(merged**2, axis=1, keepdims=True))
    return x @ (m[:, None] * (merged / size)).T


# Several adapters on the same rows.

SEVERAL = "several adapters or masks are applied to the same rows"


@near_miss(SEVERAL, a=(G, K, R))
def vmap_over_a(x, w, a, b):
    return jax.vmap(linear, (None, None, 0, None))(x, w, a, b)


@near_miss(SEVERAL, b=(G, R, N))
def vmap_over_b(x, w, a, b):
    return jax.vmap(linear, (None, None, None, 0), 1)(x, w, a, b)


@near_miss(SEVERAL, a=(G, K, R), b=(G, R, N))
def vmap_over_a_and_b(x, w, a, b):
    return jax.vmap(linear, (None, None, 0, 0), 2)(x, w, a, b)


@near_miss(SEVERAL, a=(G, K, R), b=(G, R, N))
def einsum_of_all_adapters(x, w, a, b):
    return (x @ w)[None] + jnp.einsum("tk,gkr,grn->gtn", x, a, b)


@near_miss(SEVERAL, trained="x a b scale", scale=(G,))
def vmap_over_scales(x, w, a, b, scale):
    return jax.vmap(lambda s: x @ w + s * (x @ a) @ b)(scale)


@form()
def base_and_branch_repeated(x, w, a, b):
    repeat = lambda y: jnp.broadcast_to(y[None], (G, T, N))
    return repeat(x @ w) + repeat(SCALE * (x @ a) @ b)


@form(trained="x a b bias", bias=(G, N))
def several_biases(x, w, a, b, bias):
    return (x @ w)[:, None] + bias + (SCALE * (x @ a) @ b)[:, None]


# Sums that are no adapter's.


@form()
def behind_a_linear_without_an_adapter(x, w, a, b):
    h = x + x @ (x.T @ x) / T
    h = h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
    return h @ w + (h @ a) @ b


@form(trained="x u a b bias", u=(K, K), bias=(K,))
def behind_a_linear_with_a_bias(x, u, w, a, b, bias):
    h = x @ u + bias
    return h @ w + (h @ a) @ b


@form(trained="x u v a b", u=(K, R), v=(R, K))
def behind_a_narrow_residual_layer(x, u, v, w, a, b):
    h = x + jnp.tanh(x @ u) @ v
    return h @ w + (h @ a) @ b


@form(trained="x a b c", c=(K, R))
def sum_of_two_shrinks(x, w, a, b, c):
    return x @ w + (x @ a + x @ c) @ b


@near_miss("a part of its sum is also used elsewhere")
def base_with_its_bias_returned(x, w, a, b, bias):
    base = x @ w + bias
    return base + (x @ a) @ b, base


@near_miss("not added to a frozen product")
def scaled_far_from_1_in_between(x, w, a, b):
    return x @ w + (((x @ a) * 1e25) @ b) * 1e-25

"""Near misses: products and sums that are not an adapter of a frozen weight."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.jaxlora.fuse.forms.form import BATCH, TOKENS, G, K, N, R, T, near_miss

SCALE = 1.5
TABLES = {"a": (G, K, R), "b": (G, R, N)}
IDS = jnp.asarray(np.random.default_rng(4).integers(0, G, T))
SQUARE = {"w": (K, K), "b": (R, K)}


# The branch reads the linear's own result: fused, it needs W a, which costs as much as
# a matmul of K rows.


@near_miss("as a series adapter does", **SQUARE)
def series_adapter(x, w, a, b):
    y = x @ w
    return y + (y @ a) @ b


@near_miss("as a series adapter does", **SQUARE)
def series_adapter_with_a_scale(x, w, a, b):
    y = x @ w
    return y + SCALE * ((y @ a) @ b)


@near_miss("as a series adapter does", **SQUARE, bias=(K,))
def series_adapter_after_a_bias(x, w, a, b, bias):
    y = x @ w + bias
    return y + SCALE * ((y @ a) @ b)


@near_miss("as a series adapter does", a=(N, R))
def series_adapter_of_another_width(x, w, a, b):
    y = x @ w
    return y + (y @ a) @ b


@near_miss("as a series adapter does", x=(BATCH, TOKENS, K), **SQUARE)
def series_adapter_of_a_batch(x, w, a, b):
    y = jnp.einsum("btk,kn->btn", x, w)
    return y + jnp.einsum("btn,nr,rm->btm", y, a, b)


@near_miss("as a series adapter does", **SQUARE)
def series_adapter_behind_two_linears(x, w, a, b):
    y = (x @ w) @ w
    return y + (y @ a) @ b


@near_miss(
    "as a series adapter does", w=(K, K), a=(N, R), b=(R, N), up=(K, N), trained="x a b"
)
def series_adapter_of_a_mlp_without_activation(x, w, up, a, b):
    y = x @ w @ up
    return y + (y @ a) @ b


@near_miss("added twice, with different scales", w=(K, N), m=(N, R), a=(K, R))
def base_feeds_the_shrink(x, w, m, a, b):
    """s reads both x and the base's result."""
    y = x @ w
    return y + (x @ a + y @ m) @ b


# Attention: both operands are activations.


@near_miss(x=(64, K), a=(K, R), b=(K, R), wq=(K, 48), wk=(K, 48))
def scores_with_a_decoupled_part(x, wq, wk, a, b):
    """DeepSeek's latent attention adds the scores of a few rotary features."""
    q, k = x @ wq, x @ wk
    return q @ k.T + (x @ a) @ (x @ b).T


@near_miss(
    "as a series adapter does", x=(64, K), a=(48, R), b=(48, R), wq=(K, 48), wk=(K, 48)
)
def scores_of_projected_queries(x, wq, wk, a, b):
    q, k = x @ wq, x @ wk
    return q @ k.T + (q @ a) @ (k @ b).T


@near_miss(
    "as a series adapter does",
    x=(BATCH, 64, K),
    a=(48, R),
    b=(48, R),
    wq=(K, 48),
    wk=(K, 48),
)
def scores_of_a_batch(x, wq, wk, a, b):
    q, k = x @ wq, x @ wk
    first = jnp.einsum("bqd,bkd->bqk", q, k)
    return first + jnp.einsum("bqr,bkr->bqk", q @ a, k @ b)


@near_miss("result of another matrix product", x=(64, K), a=(64, R))
def mixture_of_values(x, w, a, b):
    """The large operand is a softmax of the input."""
    p = jax.nn.softmax(x @ x.T)
    return p @ (x @ w) + (p @ a) @ b


@near_miss("computed from its input", trained="x a b")
def weight_that_is_made_from_x(x, w, a, b):
    return x @ (w * jnp.tanh(jnp.mean(x))) + (x @ a) @ b


@near_miss("result of another matrix product", x=(64, K), b=(R, K))
def linear_attention(x, w, a, b):
    state = x.T @ x
    return x @ state + (x @ a) @ b


@near_miss(trained="x h a b", h=(T, R))
def branch_of_a_recurrent_state(x, w, h, a, b):
    return x @ w + (x @ a + h) @ b


# Ways to choose an adapter that the kernels do not have.


@near_miss("A and B are chosen", **TABLES, ids=IDS)
def a_and_b_chosen_by_other_ids(x, w, a, b, ids):
    s = jnp.einsum("tk,tkr->tr", x, a[ids])
    return x @ w + jnp.einsum("tr,trn->tn", s, b[jnp.roll(ids, 1)])


@near_miss("filled in with 1", **TABLES, ids=IDS)
def a_filled_and_b_clipped(x, w, a, b, ids):
    a = a.at[ids + 1].get(mode="fill", fill_value=1)
    s = jnp.einsum("tk,tkr->tr", x, a)
    b = b.at[ids + 1].get(mode="clip")
    return x @ w + jnp.einsum("tr,trn->tn", s, b)


@near_miss("scale differs by row", **TABLES, ids=IDS)
def adapters_weighted_by_a_smoothed_one_hot(x, w, a, b, ids):
    chosen = 0.9 * jax.nn.one_hot(ids, G) + 0.1 / G
    s = jnp.einsum("tk,gkr,tg->tr", x, a, chosen)
    return x @ w + jnp.einsum("tr,grn,tg->tn", s, b, chosen)


@near_miss("several branches that choose", **TABLES, ids=IDS)
def two_adapters_for_each_row(x, w, a, b, ids):
    def branch(ids):
        s = jnp.einsum("tk,tkr->tr", x, a[ids])
        return jnp.einsum("tr,trn->tn", s, b[ids])

    return x @ w + branch(ids) + branch((ids + 1) % G)


# What is between the factors.


@near_miss("another axis")
def norm_of_s_over_rows(x, w, a, b):
    s = x @ a
    return x @ w + (s - jnp.mean(s, 0)) @ b


@near_miss("is applied between A and B")
def s_clipped(x, w, a, b):
    return x @ w + jnp.clip(x @ a, -1, 1) @ b


@near_miss("sort is applied between A and B")
def s_sorted(x, w, a, b):
    return x @ w + jnp.sort(x @ a, axis=-1) @ b


@near_miss("cumsum is applied to its branch")
def branch_accumulated_over_rows(x, w, a, b):
    return x @ w + jnp.cumsum((x @ a) @ b, axis=0)


@near_miss("reverse is applied between A and B", trained="x w a b")
def gradient_of_b_reversed(x, w, a, b):
    """A gradient reversal layer: its value is x, and its gradient is negated."""

    @jax.custom_vjp
    def reverse(value):
        return value

    reverse.defvjp(lambda v: (v, None), lambda _, d: (-d,))
    return x @ w + reverse(x @ a) @ b


@near_miss("round is applied between A and B", trained="x w a b")
def straight_through_rounding_of_s(x, w, a, b):
    s = x @ a
    s = s + lax.stop_gradient(jnp.round(s) - s)
    return x @ w + s @ b


@near_miss(trained="x w a b")
def barrier_between_base_and_branch(x, w, a, b):
    """The author asks XLA not to move anything across."""
    base, branch = lax.optimization_barrier((x @ w, (x @ a) @ b))
    return base * 2 + jnp.abs(branch)


# Weights that are made from the input.


@near_miss("computed from its input", trained="x a b")
def a_that_is_made_from_x(x, w, a, b):
    return x @ w + (x @ (a * jnp.mean(x, 0)[:, None])) @ b


@near_miss("computed from its input", trained="x a b")
def b_that_is_made_from_x(x, w, a, b):
    return x @ w + (x @ a) @ (b + jnp.tanh(jnp.max(x)))


# Sums of branches of which the kernels compute one.


@near_miss("different dropout masks", key=jax.random.key(5))
def two_branches_with_masks_of_their_own(x, w, a, b, key):
    keys = jax.random.split(key)
    drop = lambda key: jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0)
    return x @ w + drop(keys[0]) @ a @ b + drop(keys[1]) @ a @ b

"""One branch in plain `jax.numpy`, in every order in which people write it."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.jaxlora.fuse.forms.form import (
    BATCH,
    HEADS,
    TOKENS,
    K,
    N,
    R,
    form,
    random_array,
)

SCALE = 1.75
X_BATCH = (BATCH, TOKENS, K)


@form()
def textbook(x, w, a, b):
    return x @ w + SCALE * (x @ a) @ b


@form()
def no_scale(x, w, a, b):
    return x @ w + x @ a @ b


@form()
def branch_first(x, w, a, b):
    return SCALE * (x @ a @ b) + x @ w


@form()
def scale_after_shrink(x, w, a, b):
    return x @ w + ((x @ a) * SCALE) @ b


@form()
def scale_on_x(x, w, a, b):
    return x @ w + (SCALE * x) @ a @ b


@form()
def scale_on_a(x, w, a, b):
    return x @ w + x @ (a * SCALE) @ b


@form()
def scale_on_b(x, w, a, b):
    return x @ w + (x @ a) @ (SCALE * b)


@form()
def scale_on_both_sides(x, w, a, b):
    return x @ w + 0.5 * ((x @ a) * SCALE) @ b


@form()
def alpha_over_rank(x, w, a, b):
    return x @ w + (x @ a @ b) * 16.0 / a.shape[1]


@form()
def rank_stabilised(x, w, a, b):
    return x @ w + (x @ a @ b) * (8.0 / jnp.sqrt(float(R)))


@form(trained="x a b scale")
def scale_argument(x, w, a, b, scale):
    return x @ w + scale * (x @ a @ b)


@form()
def subtracted(x, w, a, b):
    return x @ w - SCALE * (x @ a) @ b


@form()
def negated_base_subtracted(x, w, a, b):
    return SCALE * (x @ a) @ b - (-(x @ w))


@form()
def merged(x, w, a, b):
    return x @ (w + SCALE * a @ b)


@form(trained="x w a b")
def merged_with_trained_w(x, w, a, b):
    return x @ (w + SCALE * a @ b)


@form(trained="x w a b")
def trained_w(x, w, a, b):
    return x @ w + SCALE * (x @ a) @ b


@form()
def product_of_a_and_b_first(x, w, a, b):
    return x @ w + SCALE * (x @ (a @ b))


@form(trained="x a b bias")
def bias_before_branch(x, w, a, b, bias):
    return (x @ w + bias) + SCALE * (x @ a) @ b


@form(trained="x a b bias")
def bias_after_branch(x, w, a, b, bias):
    return (x @ w + SCALE * (x @ a) @ b) + bias


@form(trained="x a b residual", residual=(37, N))
def multiple_of_a_residual_before_branch(x, w, a, b, residual):
    return (x @ w - 2.0 * residual) + SCALE * (x @ a) @ b


@form(trained="x a b bias", x=X_BATCH)
def bias_by_reshape(x, w, a, b, bias):
    y = lax.dot_general(x, w, (((2,), (0,)), ((), ())))
    return y + jnp.reshape(bias, (1, 1, -1)) + x @ a @ b


@form(w=(N, K), a=(R, K), b=(N, R))
def torch_layout(x, w, a, b):
    return x @ w.T + SCALE * (x @ a.T) @ b.T


@form(x=(K, 29), w=(N, K), a=(R, K), b=(N, R))
def weights_on_the_left(x, w, a, b):
    return w @ x + SCALE * (b @ (a @ x))


@form(w=(N, K), a=(R, K), b=(N, R))
def columns_transposed_after(x, w, a, b):
    return (w @ x.T + b @ (a @ x.T)).T


@form(x=X_BATCH)
def batch_dimensions(x, w, a, b):
    return x @ w + SCALE * (x @ a) @ b


@form(x=X_BATCH)
def rows_flattened_and_restored(x, w, a, b):
    rows = x.reshape(-1, x.shape[-1])
    y = rows @ w + (rows @ a) @ b
    return y.reshape(*x.shape[:-1], -1)


@form(x=X_BATCH)
def only_the_branch_flattened(x, w, a, b):
    rows = x.reshape(-1, x.shape[-1])
    return x @ w + SCALE * (rows @ a @ b).reshape(*x.shape[:-1], -1)


@form(x=X_BATCH)
def einsum_of_two(x, w, a, b):
    s = jnp.einsum("btk,kr->btr", x, a)
    return jnp.einsum("btk,kn->btn", x, w) + jnp.einsum("btr,rn->btn", s, b)


@form(x=X_BATCH)
def einsum_of_three(x, w, a, b):
    return jnp.einsum("btk,kn->btn", x, w) + jnp.einsum("btk,kr,rn->btn", x, a, b)


@form(x=X_BATCH, w=(K, HEADS, N // HEADS), b=(R, HEADS, N // HEADS))
def heads_in_the_output(x, w, a, b):
    s = jnp.einsum("btd,dr->btr", x, a)
    delta = jnp.einsum("btr,rhk->bthk", s, b)
    return jnp.einsum("btd,dhk->bthk", x, w) + SCALE * delta


@form(x=(BATCH, TOKENS, 7, 8), w=(7, 8, N), a=(7, 8, R))
def heads_in_the_input(x, w, a, b):
    s = jnp.einsum("bthd,hdr->btr", x, a)
    return jnp.einsum("bthd,hdn->btn", x, w) + SCALE * jnp.einsum("btr,rn->btn", s, b)


@form(x=X_BATCH)
def heads_split_before_the_sum(x, w, a, b):
    def split(y):
        return y.reshape(BATCH, TOKENS, HEADS, -1).transpose(0, 2, 1, 3)

    return split(x @ w) + split(x @ a @ b)


@form()
def shrink_by_multiply_and_sum(x, w, a, b):
    s = jnp.sum(x[:, :, None] * a[None], axis=1)
    return x @ w + SCALE * s @ b


@form(x=(K,))
def one_token(x, w, a, b):
    return x @ w + SCALE * (x @ a) @ b


@form(dtype=jnp.bfloat16)
def bfloat16(x, w, a, b):
    a, b = a.astype(x.dtype), b.astype(x.dtype)
    return x @ w + SCALE * (x @ a) @ b


def small_b():
    """B of the size that training gives it: the branch is a small correction."""
    return 0.1 * random_array("b", (R, N))


@form(dtype=jnp.bfloat16, b=small_b)
def branch_in_float32_and_rounded(x, w, a, b):
    s = jnp.dot(x, a.astype(x.dtype), preferred_element_type=jnp.float32)
    y = jnp.dot(x, w, preferred_element_type=jnp.float32)
    return (y + SCALE * (s @ b)).astype(x.dtype)


@form(
    sites=3,
    trained="x aq ak av bq bk bv",
    x=X_BATCH,
    wq=(K, N),
    wk=(K, 24),
    wv=(K, 24),
    **dict.fromkeys(("aq", "ak", "av"), (K, R)),
    bq=(R, N),
    bk=(R, 24),
    bv=(R, 24),
)
def three_projections_of_x(x, wq, wk, wv, aq, ak, av, bq, bk, bv):
    q = x @ wq + SCALE * (x @ aq) @ bq
    k = x @ wk + SCALE * (x @ ak) @ bk
    v = x @ wv + SCALE * (x @ av) @ bv
    return q, k, v


@form(
    sites=3,
    trained="x a1 b1 a2 b2 a3 b3",
    w1=(K, N),
    w2=(K, N),
    w3=(N, K),
    a1=(K, R),
    b1=(R, N),
    a2=(K, R),
    b2=(R, N),
    a3=(N, R),
    b3=(R, K),
)
def gated_mlp(x, w1, w2, w3, a1, b1, a2, b2, a3, b3):
    gate = x @ w1 + x @ a1 @ b1
    up = x @ w2 + x @ a2 @ b2
    hidden = jax.nn.silu(gate) * up
    return x + hidden @ w3 + hidden @ a3 @ b3


@form(trained="x w a b")
def gradient_of_a_stopped(x, w, a, b):
    return x @ w + (x @ jax.lax.stop_gradient(a)) @ b


@form(trained="x w a b")
def gradient_of_x_stopped(x, w, a, b):
    x = jax.lax.stop_gradient(x)
    return x @ w + (x @ a) @ b


@form(trained="x w a b", w2=(K, N))
def sums_of_inputs_and_of_weights(x, w, w2, a, b):
    x = x + jnp.sin(x)
    return x @ (w + w2) + (x @ a) @ b


@form(trained="x w a b")
def a_is_also_regularised(x, w, a, b):
    return x @ w + (x @ a) @ b, a.T @ a


@form(trained="x w a b")
def weights_rounded_to_bfloat16_and_back(x, w, a, b):
    w, a = (v.astype(jnp.bfloat16).astype(v.dtype) for v in (w, a))
    return x @ w + (x @ a) @ b


@form(exact=lambda x, w, a, b: jnp.tanh(x) @ w + (jnp.tanh(x) @ a) @ b)
def rounded_input_cast_back_twice(x, w, a, b):
    x = jnp.tanh(x).astype(jnp.bfloat16)
    return x.astype(jnp.float32) @ w + (x.astype(jnp.float32) @ a) @ b

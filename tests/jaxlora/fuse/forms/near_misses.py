"""Functions that look like a linear with a low-rank branch and are none.

Each differs in one thing from a form that is rewritten.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.jaxlora.fuse.forms.form import BATCH, TOKENS, G, K, N, R, T, near_miss

SCALE = 1.75
KEY = jax.random.key(9)
KEEP = 0.8
X_BATCH = (BATCH, TOKENS, K)
TABLES = {"a": (G, K, R), "b": (G, R, N)}


@near_miss("is not small", a=(K, 40), b=(40, N))
def rank_is_not_small(x, w, a, b):
    return x @ w + SCALE * (x @ a) @ b


@near_miss("is not small", a=(K, K), b=(K, N))
def rank_is_full(x, w, a, b):
    return x @ w + SCALE * (x @ a) @ b


@near_miss("is not small", trained="x a b", w=(K, R), b=(R, R))
def base_is_as_thin_as_the_branch(x, w, a, b):
    return x @ w + x @ a @ b


@near_miss()
def no_base(x, a, b):
    return SCALE * (x @ a) @ b


@near_miss(trained="x a b c d", c=(K, R), d=(R, N))
def two_branches_without_a_base(x, a, b, c, d):
    return x @ a @ b + x @ c @ d


@near_miss("is also used elsewhere")
def branch_returned(x, w, a, b):
    branch = SCALE * (x @ a) @ b
    return x @ w + branch, branch


@near_miss("is also used elsewhere")
def base_returned(x, w, a, b):
    base = x @ w
    return base + SCALE * (x @ a) @ b, base


@near_miss("is also used elsewhere")
def s_returned(x, w, a, b):
    s = x @ a
    return x @ w + SCALE * s @ b, s


@near_miss("is also used elsewhere", trained="x a b c", c=(R, 5))
def s_read_by_another_matmul(x, w, a, b, c):
    s = x @ a
    return x @ w + SCALE * s @ b, s @ c


@near_miss("relu is applied between A and B")
def activation_between_a_and_b(x, w, a, b):
    return x @ w + SCALE * jax.nn.relu(x @ a) @ b


@near_miss("exp is applied between A and B")
def softmax_between_a_and_b(x, w, a, b):
    return x @ w + jax.nn.softmax(x @ a) @ b


@near_miss("scale differs by row")
def norm_between_a_and_b(x, w, a, b):
    s = x @ a
    s = s * lax.rsqrt(jnp.mean(s * s, -1, keepdims=True) + 1e-6)
    return x @ w + s @ b


@near_miss("round is applied between A and B")
def rounded_between_a_and_b(x, w, a, b):
    s = jnp.round((x @ a) * 16) / 16
    return x @ w + s @ b


@near_miss("tanh is applied to its branch")
def activation_on_the_branch(x, w, a, b):
    return x @ w + jnp.tanh(x @ a @ b)


@near_miss("tanh is applied to its frozen product")
def activation_on_the_base(x, w, a, b):
    return jnp.tanh(x @ w) + x @ a @ b


@near_miss("different x", trained="x x2 a b", x2=(T, K))
def two_different_x(x, x2, w, a, b):
    return x @ w + x2 @ a @ b


@near_miss("different x")
def branch_reads_the_row_before(x, w, a, b):
    return x @ w + jnp.roll(x, 1, axis=0) @ a @ b


@near_miss("different x")
def branch_reads_normalised_x(x, w, a, b):
    normed = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x @ w + normed @ a @ b


@near_miss("another axis")
def branch_reads_the_mean_of_rows(x, w, a, b):
    return x @ w + x.mean(0) @ a @ b


@near_miss("different x")
def base_reads_rounded_x(x, w, a, b):
    rounded = jnp.clip(jnp.round(x * 8), -127, 127) / 8
    return rounded @ w + x @ a @ b


@near_miss("another axis", x=(K, K), a=(K, R), b=(R, N))
def sum_over_the_wrong_axis(x, w, a, b):
    return x @ w + SCALE * jnp.einsum("kt,kr->tr", x, a) @ b


@near_miss("another axis", x=(N, K))
def branch_added_transposed(x, w, a, b):
    return x @ w + (x @ a @ b).T


@near_miss(b=(R, R), x=(BATCH, R, K))
def branch_contracts_tokens_with_b(x, w, a, b):
    s = jnp.einsum("btk,kr->btr", x, a)
    delta = jnp.einsum("btr,tn->brn", s, b)
    return jnp.einsum("btk,kn->btn", x, w)[..., :R] + delta


@near_miss()
def branch_multiplied(x, w, a, b):
    return (x @ w) * (x @ a @ b)


@near_miss()
def larger_of_base_and_branch(x, w, a, b):
    return jnp.maximum(x @ w, x @ a @ b)


@near_miss(b=(R, 24))
def branch_on_some_columns(x, w, a, b):
    return (x @ w).at[:, :24].add(x @ a @ b)


@near_miss("another shape", b=(R, 1))
def branch_broadcast_over_columns(x, w, a, b):
    return x @ w + x @ a @ b


@near_miss("row|token", trained="x a b gate", gate=(T, 1))
def scale_of_each_row(x, w, a, b, gate):
    return x @ w + gate * (x @ a @ b)


@near_miss("scale differs by row")
def scale_computed_from_x(x, w, a, b):
    return x @ w + jax.nn.sigmoid(x[:, :1]) * (x @ a @ b)


@near_miss("masked x is also used", key=KEY)
def dropped_x_returned(x, w, a, b, key):
    dropped = jnp.where(jax.random.bernoulli(key, KEEP, x.shape), x / KEEP, 0)
    return x @ w + dropped @ a @ b, dropped


@near_miss("mask", trained="x x2 a b", x2=(T, K), key=KEY)
def mask_also_drops_another_tensor(x, x2, w, a, b, key):
    kept = jax.random.bernoulli(key, KEEP, x.shape)
    y = x @ w + jnp.where(kept, x / KEEP, 0) @ a @ b
    return y, jnp.where(kept, x2, 0)


@near_miss("mask", key=KEY)
def dropout_between_a_and_b(x, w, a, b, key):
    s = x @ a
    s = jnp.where(jax.random.bernoulli(key, KEEP, s.shape), s / KEEP, 0)
    return x @ w + s @ b


@near_miss("mask", key=KEY)
def dropout_after_b(x, w, a, b, key):
    branch = x @ a @ b
    kept = jax.random.bernoulli(key, KEEP, branch.shape)
    return x @ w + jnp.where(kept, branch / KEEP, 0)


@near_miss("different x", key=KEY)
def noise_in_place_of_zeros(x, w, a, b, key):
    kept = jax.random.bernoulli(key, KEEP, x.shape)
    return x @ w + jnp.where(kept, x, 0.5) @ a @ b


@near_miss("different x", key=KEY)
def base_reads_the_dropped_x(x, w, a, b, key):
    dropped = jnp.where(jax.random.bernoulli(key, KEEP, x.shape), x / KEEP, 0)
    return dropped @ w + x @ a @ b


@near_miss("stop_gradient is applied between A and B", trained="x a b")
def gradient_stopped_between_a_and_b(x, w, a, b):
    return x @ w + SCALE * lax.stop_gradient(x @ a) @ b


@near_miss("different x", trained="x a b")
def gradient_stopped_before_the_branch(x, w, a, b):
    return x @ w + SCALE * (lax.stop_gradient(x) @ a) @ b


@near_miss("scale differs by row", trained="x a b gates", **TABLES, gates=(T, G))
def soft_mixture_of_adapters(x, w, a, b, gates):
    s = jnp.einsum("tk,gkr,tg->tgr", x, a, jax.nn.softmax(gates))
    return x @ w + jnp.einsum("tgr,grn->tn", s, b)


@near_miss("A and B are chosen", **TABLES, adapter=jnp.array([2, 0, 1]), x=X_BATCH)
def a_and_b_of_different_adapters(x, w, a, b, adapter):
    return x @ w + SCALE * (x @ a[adapter]) @ b[(adapter + 1) % G]


@near_miss(
    "A and B are chosen",
    **TABLES,
    sizes=jnp.array([11, 0, 26], jnp.int32),
    other_sizes=jnp.array([5, 6, 26], jnp.int32),
)
def ragged_dots_of_different_sizes(x, w, a, b, sizes, other_sizes):
    s = lax.ragged_dot(x, a, sizes)
    return x @ w + lax.ragged_dot(s, b, other_sizes)


@near_miss(**TABLES)
def segments_in_another_order(x, w, a, b):
    deltas = [x[20:] @ a[0] @ b[0], x[:20] @ a[1] @ b[1]]
    return x @ w + SCALE * jnp.concatenate(deltas)


@near_miss(**TABLES)
def segments_with_overlap(x, w, a, b):
    deltas = [x[:20] @ a[0] @ b[0], x[19:36] @ a[1] @ b[1]]
    return x @ w + SCALE * jnp.concatenate(deltas)


@near_miss(**TABLES)
def activation_on_one_segment(x, w, a, b):
    deltas = [x[:20] @ a[0] @ b[0], jnp.tanh(x[20:] @ a[1] @ b[1])]
    return x @ w + SCALE * jnp.concatenate(deltas)


@near_miss("is also used elsewhere", **TABLES)
def branch_of_one_segment_returned(x, w, a, b):
    deltas = [x[:20] @ a[0] @ b[0], x[20:] @ a[1] @ b[1]]
    return x @ w + SCALE * jnp.concatenate(deltas), deltas[1]


@near_miss("differs by sequence", x=(BATCH, TOKENS, K), w=(BATCH, K, N))
def base_weight_of_each_sequence(x, w, a, b):
    return x @ w + x @ a @ b


@near_miss(adapted=jnp.bool_(True))
def branch_in_a_cond(x, w, a, b, adapted):
    branch = lax.cond(
        adapted, lambda x, a, b: x @ a @ b, lambda x, a, b: jnp.zeros((T, N)), x, a, b
    )
    return x @ w + branch


@near_miss(x=(2, 9, 9, 8), w=(3, 3, 8, 24), a=(3, 3, 8, 2), b=(2, 24))
def convolutions(x, w, a, b):
    def convolve(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    return convolve(x, w) + convolve(x, a) @ b


INTEGERS = np.random.default_rng(2)


@near_miss(
    "its dtype is int32",
    trained="",
    x=jnp.asarray(INTEGERS.integers(-9, 9, (T, K))),
    w=jnp.asarray(INTEGERS.integers(-9, 9, (K, N))),
    a=jnp.asarray(INTEGERS.integers(-9, 9, (K, R))),
    b=jnp.asarray(INTEGERS.integers(-9, 9, (R, N))),
)
def integers(x, w, a, b):
    return x @ w + x @ a @ b


@near_miss("its dtype is complex64")
def complex_numbers(x, w, a, b):
    x, w = x * (1 + 2j), w * (1 - 1j)
    return x @ w + x @ a @ b


@near_miss("summed in float32", dtype=jnp.bfloat16)
def branch_in_float32_beside_bfloat16(x, w, a, b):
    """The kernels would round the branch and its gradients to bfloat16."""
    return x @ w + SCALE * (x.astype(jnp.float32) @ a) @ b


@near_miss("weights are the input")
def attention_beside_a_thin_path(x, w, a, b):
    """The large matmul is with itself, not with a weight."""
    return x @ x.T + (x @ a) @ (x @ a).T

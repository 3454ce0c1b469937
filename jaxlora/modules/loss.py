"""Cross entropy of the tokens that are trained on, and no others."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_MAX_CHUNK = 256


def target_nll(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"],
    labels: Int[Array, " T"],
    is_target: Bool[Array, " T"],
) -> Float[Array, " T"]:
    """Negative log likelihood of each target row's label, in nats; 0 elsewhere.

    Rows that are trained on are gathered to the front and go through the head in
    chunks; a chunk without any is skipped. Nothing of T x V is kept for the backward
    pass, which makes the logits again. The head is frozen: its gradient is zero.

    Args:
        hidden: Hidden states after the last norm.
        head: Output projection.
        labels: The token that each row should predict.
        is_target: Which rows are trained on.
    """
    # Stable, so that a job's rows keep their order.
    order = jnp.argsort(~is_target, stable=True)
    place = jnp.argsort(order)  # the inverse permutation
    take = functools.partial(_permute, order=order, place=place)
    nll = _target_nll(take(hidden), head, labels[order], is_target[order])
    return _permute(nll, order=place, place=order)


@jax.custom_vjp
def _permute(x, order, place):
    return x[order]


# The gradient of a gather is a scatter, which adds; of a permutation, a gather.
_permute.defvjp(
    lambda x, order, place: (x[order], place), lambda place, dx: (dx[place], None, None)
)


def _logits(hidden, head):
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)


def _nll_chunk(head, hidden, labels, is_target):
    logits = _logits(hidden, head)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.where(is_target, nll, 0.0)


def _gradient_chunk(head, hidden, labels, is_target, dnll):
    probabilities = jax.nn.softmax(_logits(hidden, head), axis=-1)
    hit = jnp.arange(head.shape[1]) == labels[:, None]
    dlogits = jnp.where(hit, probabilities - 1.0, probabilities)
    # Select, not multiply: a row that is no target may hold anything.
    dlogits = jnp.where(is_target[:, None], dlogits * dnll[:, None], 0.0)
    return jnp.matmul(dlogits.astype(head.dtype), head.T).astype(hidden.dtype)


def _over_chunks(compute, head, is_target, *rows):
    """`compute` on each chunk that has a target row; zeros for the others."""

    def split(x):
        return x.reshape(-1, math.gcd(x.shape[0], _MAX_CHUNK), *x.shape[1:])

    chunks = tuple(split(x) for x in (*rows, is_target))
    like = jax.eval_shape(compute, head, *(x[0] for x in chunks))

    def step(_, chunk):
        return None, jax.lax.cond(
            chunk[-1].any(),
            lambda: compute(head, *chunk),
            lambda: jnp.zeros(like.shape, like.dtype),
        )

    out = jax.lax.scan(step, None, chunks)[1]
    return out.reshape(-1, *out.shape[2:])


@jax.custom_vjp
def _target_nll(hidden, head, labels, is_target):
    return _over_chunks(_nll_chunk, head, is_target, hidden, labels)


def _forward(hidden, head, labels, is_target):
    return _target_nll(hidden, head, labels, is_target), (
        hidden,
        head,
        labels,
        is_target,
    )


def _backward(residuals, dnll):
    hidden, head, labels, is_target = residuals

    def compute(head, hidden, labels, dnll, is_target):
        return _gradient_chunk(head, hidden, labels, is_target, dnll)

    dhidden = _over_chunks(compute, head, is_target, hidden, labels, dnll)
    return dhidden, None, None, None


_target_nll.defvjp(_forward, _backward)

"""Cross entropy of the tokens that are trained on, and no others."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Enough rows that a product with the head is bound by arithmetic, not by reading it.
_MAX_CHUNK = 1024
_CHUNK_MULTIPLE = 128
_MAX_LOGITS_BYTES = 512 * 2**20


def target_nll(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"] | Float[Array, "V D"],
    labels: Int[Array, " T"],
    is_target: Bool[Array, " T"],
    *,
    head_transposed: bool = False,
) -> Float[Array, " T"]:
    """Negative log likelihood of each target row's label, in nats; 0 elsewhere.

    Only target rows go through the head, in as many chunks as they fill. Where a
    gradient is wanted, it is made from the same logits as the loss and kept for a
    unit cotangent, in hidden's dtype; of T x V nothing is kept. The head is frozen:
    its gradient is zero.

    Args:
        hidden: Hidden states after the last norm.
        head: Output projection.
        labels: The token that each row should predict.
        is_target: Which rows are trained on.
        head_transposed: Whether head is stored V D, as a tied embedding is; it is
            used as it lies.
    """
    return _target_nll(hidden, head, labels, is_target, head_transposed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _target_nll(hidden, head, labels, is_target, head_transposed):
    def compute(hidden, labels):
        return (_nll(hidden, head, labels, head_transposed)[0],)

    chunk = _chunk_rows(head.shape[not head_transposed], len(labels))
    (nll,), place = _over_targets(compute, is_target, hidden, labels, chunk=chunk)
    return jnp.where(is_target, nll[place], 0.0)


def _forward(hidden, head, labels, is_target, head_transposed):
    def compute(hidden, labels):
        return _nll_and_gradient(hidden, head, labels, head_transposed)

    chunk = _chunk_rows(head.shape[not head_transposed], len(labels))
    out, place = _over_targets(compute, is_target, hidden, labels, chunk=chunk)
    nll, gradient = out
    return jnp.where(is_target, nll[place], 0.0), (gradient, place, is_target)


def _backward(head_transposed, residuals, dnll):
    gradient, place, is_target = residuals
    dhidden = (gradient[place] * dnll[:, None]).astype(gradient.dtype)
    # Select, not multiply: a row that is no target may hold anything.
    return jnp.where(is_target[:, None], dhidden, 0), None, None, None


_target_nll.defvjp(_forward, _backward)


def _chunk_rows(vocab_size: int, num_rows: int) -> int:
    rows = _MAX_LOGITS_BYTES // (4 * vocab_size)
    rows = max(rows // _CHUNK_MULTIPLE, 1) * _CHUNK_MULTIPLE
    return min(rows, _MAX_CHUNK, num_rows)


def _over_targets(compute, is_target, *rows, chunk: int):
    """`compute` of the target rows, gathered to the front, and each row's place there.

    All chunks have one shape, so that what becomes of a row does not depend on how
    many others are targets; the last is filled up with row 0. Chunks without any target
    are skipped.
    """
    t = len(is_target)
    # Behind a barrier, or XLA counts again for every value that is gathered by it.
    place = jax.lax.optimization_barrier(jnp.cumsum(is_target) - 1)
    num_chunks = -(-t // chunk)
    source = jnp.zeros(num_chunks * chunk, jnp.int32)
    source = source.at[jnp.where(is_target, place, len(source))].set(
        jnp.arange(t, dtype=jnp.int32), mode="drop"
    )
    num_targets = is_target.sum()

    def of_rows(taken):
        return compute(*(x[taken] for x in rows))

    def zeros(taken):
        like = jax.eval_shape(of_rows, taken)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in like)

    def step(first, taken):
        outs = jax.lax.cond(first < num_targets, of_rows, zeros, taken)
        return first + chunk, outs

    _, outs = jax.lax.scan(step, 0, source.reshape(num_chunks, chunk))
    outs = tuple(out.reshape(-1, *out.shape[2:]) for out in outs)
    return outs, jnp.maximum(place, 0)


def _product(x, head, axis: int):
    """Contracts x's features with an axis of the head as it lies; no copy of it."""
    dims = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, head, dims, preferred_element_type=jnp.float32)


def _nll(hidden, head, labels, head_transposed):
    logits = _product(hidden, head, 1 if head_transposed else 0)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return log_total - picked, logits, log_total


def _nll_and_gradient(hidden, head, labels, head_transposed):
    """Each row's loss and `(softmax - one hot) head^T`."""
    nll, logits, log_total = _nll(hidden, head, labels, head_transposed)
    hit = jnp.arange(logits.shape[1]) == labels[:, None]
    dlogits = jnp.exp(logits - log_total[:, None]) - hit
    gradient = _product(dlogits.astype(head.dtype), head, 0 if head_transposed else 1)
    return nll, gradient.astype(hidden.dtype)

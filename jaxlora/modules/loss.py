"""Cross entropy of the target tokens."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlora.modules.scoring import softcap
from jaxlora.sharding.rules import TENSOR
from jaxlora.sharding.tensor import first_index, own_indices

# With this many rows, a product with the head is bound by arithmetic, not by memory.
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
    logit_softcap: float | None = None,
    vocab_parts: int = 1,
) -> Float[Array, " T"]:
    """Negative log likelihood of each target row's label, in nats; 0 elsewhere.

    Only target rows go through the head, in as many chunks as they fill. If a gradient
    is wanted, it is computed from the same logits as the loss, and kept in hidden's
    dtype for a cotangent of 1. Nothing of size T x V is kept. The head is frozen, so
    its gradient is zero.

    Args:
        hidden: Hidden states after the last norm.
        head: Output projection.
        labels: The token that each row should predict.
        is_target: Which rows are trained on.
        head_transposed: Whether head is stored V D, as a tied embedding is. It is used
            without a copy.
        logit_softcap: Bound of the logits, see `softcap`; None: there is none.
        vocab_parts: Devices among which the vocabulary is divided. The head is a
            device's part of it then, and so is the gradient of hidden a term of a sum
            over them; see `jaxlora.sharding.tensor`. Logits are never gathered: three
            numbers for each row are exchanged.
    """
    options = _Head(head_transposed, logit_softcap, vocab_parts)
    return _target_nll(hidden, head, labels, is_target, options)


class _Head(NamedTuple):
    """The head that makes logits; see `target_nll`."""

    transposed: bool
    softcap: float | None
    parts: int

    def num_logits(self, head: Array) -> int:
        return head.shape[0 if self.transposed else 1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _target_nll(hidden, head, labels, is_target, options):
    def compute(hidden, labels):
        return (_nll(hidden, head, labels, options)[0],)

    chunk = _chunk_rows(options.num_logits(head), len(labels))
    (nll,), place = _over_targets(compute, is_target, hidden, labels, chunk=chunk)
    return jnp.where(is_target, nll[place], 0.0)


def _forward(hidden, head, labels, is_target, options):
    def compute(hidden, labels):
        return _nll_and_gradient(hidden, head, labels, options)

    chunk = _chunk_rows(options.num_logits(head), len(labels))
    out, place = _over_targets(compute, is_target, hidden, labels, chunk=chunk)
    nll, gradient = out
    return jnp.where(is_target, nll[place], 0.0), (gradient, place, is_target)


def _backward(options, residuals, dnll):
    gradient, place, is_target = residuals
    dhidden = (gradient[place] * dnll[:, None]).astype(gradient.dtype)
    # Select, do not multiply: a row that is no target may hold anything.
    return jnp.where(is_target[:, None], dhidden, 0), None, None, None


_target_nll.defvjp(_forward, _backward)


def _chunk_rows(vocab_size: int, num_rows: int) -> int:
    rows = _MAX_LOGITS_BYTES // (4 * vocab_size)
    rows = max(rows // _CHUNK_MULTIPLE, 1) * _CHUNK_MULTIPLE
    return min(rows, _MAX_CHUNK, num_rows)


def _over_targets(compute, is_target, *rows, chunk: int):
    """Runs `compute` on the target rows, gathered to the front.

    All chunks have one shape, so the result for a row does not depend on how many other
    rows are targets. The last chunk is filled up with row 0. Chunks without a target
    are skipped.

    Returns:
        The results of `compute` for the gathered rows, and each row's place in them.
    """
    t = len(is_target)
    # Without the barrier XLA would count again for every value that is gathered.
    place = jax.lax.optimization_barrier(jnp.cumsum(is_target) - 1)
    num_chunks = -(-t // chunk)
    source = jnp.zeros(num_chunks * chunk, jnp.int32)
    source = source.at[jnp.where(is_target, place, len(source))].set(
        jnp.arange(t, dtype=jnp.int32), mode="drop"
    )
    num_targets = is_target.sum()

    def compute_rows(taken):
        return compute(*(x[taken] for x in rows))

    def zeros(taken):
        like = jax.eval_shape(compute_rows, taken)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in like)

    def step(first, taken):
        outs = jax.lax.cond(first < num_targets, compute_rows, zeros, taken)
        return first + chunk, outs

    _, outs = jax.lax.scan(step, 0, source.reshape(num_chunks, chunk))
    outs = tuple(out.reshape(-1, *out.shape[2:]) for out in outs)
    return outs, jnp.maximum(place, 0)


def _product(x, head, axis: int):
    """Contracts the features of x with an axis of the head, without a copy of it."""
    dims = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, head, dims, preferred_element_type=jnp.float32)


def head_logits(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"] | Float[Array, "V D"],
    *,
    head_transposed: bool = False,
    logit_softcap: float | None = None,
) -> Float[Array, "T V"]:
    """Computes the logits of rows, in float32; for the arguments see `target_nll`."""
    logits = _product(hidden, head, 1 if head_transposed else 0)
    return softcap(logits, logit_softcap)


def _nll(hidden, head, labels, options: _Head):
    logits = head_logits(
        hidden,
        head,
        head_transposed=options.transposed,
        logit_softcap=options.softcap,
    )
    if options.parts > 1:
        log_total, picked = _of_all_parts(logits, labels, options.parts)
    else:
        log_total = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return log_total - picked, logits, log_total


def _of_all_parts(logits, labels, parts: int):
    """Returns the log of the sum of exponentials of each row, and its label's logit."""
    label, is_own = own_indices(labels, logits.shape[1], parts)
    most = jax.lax.pmax(logits.max(axis=-1), TENSOR)
    total = jnp.exp(logits - most[:, None]).sum(axis=-1)
    picked = jnp.take_along_axis(logits, label[:, None], axis=-1)[:, 0]
    both = jnp.stack([total, jnp.where(is_own, picked, 0.0)])
    total, picked = jax.lax.psum(both, TENSOR)
    return jnp.log(total) + most, picked


def _nll_and_gradient(hidden, head, labels, options: _Head):
    """Returns each row's loss and `dlogits head^T`, where dlogits = softmax - one hot.

    A soft cap multiplies dlogits by its slope, `1 - (logits / cap)^2`.
    """
    nll, logits, log_total = _nll(hidden, head, labels, options)
    first = first_index(logits.shape[1], options.parts)
    hit = jnp.arange(logits.shape[1]) == labels[:, None] - first
    dlogits = jnp.exp(logits - log_total[:, None]) - hit
    if options.softcap is not None:
        dlogits *= 1 - (logits / options.softcap) ** 2
    axis = 0 if options.transposed else 1
    gradient = _product(dlogits.astype(head.dtype), head, axis)
    return nll, gradient.astype(hidden.dtype)

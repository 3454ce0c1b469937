"""Cross entropy of the target tokens."""

import functools
from typing import Any, NamedTuple

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


class HeadRows(NamedTuple):
    """Rows of a head, stored V D, that slots train instead of the frozen ones.

    Attributes:
        rows: Rows of each slot, G E D.
        ids: The token of each row, G E; -1: the slot does not have it.
        block_adapter: Slot of each block of hidden states, NB; -1: none.
    """

    rows: Array
    ids: Array
    block_adapter: Array

    def slots(self, num_rows: int) -> Int[Array, " T"]:
        """Returns the slot of each row of hidden states."""
        return jnp.repeat(self.block_adapter, num_rows // len(self.block_adapter))


class SoftLabels(NamedTuple):
    """Targets of rows that may be distributions over several tokens.

    The loss of a row is the sum over these of `share (-log softmax(scale logits))`.

    Attributes:
        ids: Tokens, T C; those with a share differ.
        shares: Their shares, T C, of any sum; 0: none.
        scale: Factor of the logits of each row, T.
    """

    ids: Array
    shares: Array
    scale: Array

    @staticmethod
    def of(labels: Int[Array, " T"], num: int) -> "SoftLabels":
        """Returns labels that are one token each, with room for so many."""
        first = jnp.arange(num) == 0
        return SoftLabels(
            ids=jnp.where(first, labels[:, None], 0),
            shares=jnp.where(first, 1.0, 0.0) * jnp.ones((len(labels), 1)),
            scale=jnp.ones(len(labels)),
        )


def target_nll(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"] | Float[Array, "V D"],
    labels: Int[Array, " T"] | SoftLabels,
    is_target: Bool[Array, " T"],
    *,
    head_transposed: bool = False,
    logit_softcap: float | None = None,
    own: HeadRows | None = None,
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
        labels: The token that each row should predict, or several with shares.
        is_target: Which rows are trained on.
        head_transposed: Whether head is stored V D, as a tied embedding is. It is used
            without a copy.
        logit_softcap: Bound of the logits, see `softcap`; None: there is none.
        own: Rows of the head that slots train, and which have a gradient; None: there
            are none.
        vocab_parts: Devices among which the vocabulary is divided. The head is a
            device's part of it then, and so is the gradient of hidden a term of a sum
            over them; see `jaxlora.sharding.tensor`. Logits are never gathered: three
            numbers for each row are exchanged. A device replaces the rows of its own
            part, so their gradient is a term of a sum, too.
    """
    options = HeadOptions(head_transposed, logit_softcap, vocab_parts)
    return _target_nll(hidden, head, labels, is_target, own, options)


class HeadOptions(NamedTuple):
    """The head that makes logits; see `target_nll`."""

    transposed: bool
    softcap: float | None
    parts: int = 1

    def num_logits(self, head: Array) -> int:
        return head.shape[0 if self.transposed else 1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _target_nll(hidden, head, labels, is_target, own, options):
    def compute(hidden, labels, *slots):
        return (_nll(hidden, head, labels, options, own, *slots)[0],)

    rows = hidden, labels, *_slots_of(own, len(hidden))
    chunk = chunk_rows(options.num_logits(head), len(hidden))
    (nll,), place = over_targets(compute, is_target, *rows, chunk=chunk)
    return jnp.where(is_target, nll[place], 0.0)


def _slots_of(own: HeadRows | None, num_rows: int) -> tuple[Array, ...]:
    return () if own is None else (own.slots(num_rows),)


def _forward(hidden, head, labels, is_target, own, options):
    def compute(hidden, labels, *slots):
        return nll_and_gradient(hidden, head, labels, options, own, *slots)

    rows = hidden, labels, *_slots_of(own, len(hidden))
    chunk = chunk_rows(options.num_logits(head), len(hidden))
    out, place = over_targets(compute, is_target, *rows, chunk=chunk)
    nll, gradient, *of_own = out
    kept = None if own is None else (hidden, own, *of_own)
    return jnp.where(is_target, nll[place], 0.0), (gradient, place, is_target, kept)


def _backward(options, residuals, dnll):
    gradient, place, is_target, kept = residuals
    dhidden = (gradient[place] * dnll[:, None]).astype(gradient.dtype)
    of_own: Any = None
    if kept is not None:
        hidden, own, dlogits = kept
        dlogits = jnp.where(is_target[:, None], dlogits[place] * dnll[:, None], 0)
        gradients: Any = HeadRows  # with None in the place of what is not trained
        of_own = gradients(_row_gradients(hidden, dlogits, own), None, None)
    # Select, do not multiply: a row that is no target may hold anything.
    return jnp.where(is_target[:, None], dhidden, 0), None, None, None, of_own


def _row_gradients(hidden, dlogits, own: HeadRows) -> Float[Array, "G E D"]:
    """Returns the gradients of rows, which are summed by block and then by slot."""
    num_blocks = len(own.block_adapter)
    x, dlogits = (v.reshape(num_blocks, -1, v.shape[1]) for v in (hidden, dlogits))
    by_block = jnp.einsum(
        "bte,btd->bed",
        dlogits.astype(hidden.dtype),
        jnp.where((dlogits != 0).any(axis=2)[:, :, None], x, 0),
        preferred_element_type=jnp.float32,
    )
    mine = own.block_adapter == jnp.arange(len(own.rows))[:, None]
    return jnp.where(mine[:, :, None, None], by_block[None], 0.0).sum(axis=1)


_target_nll.defvjp(_forward, _backward)


def chunk_rows(vocab_size: int, num_rows: int) -> int:
    """Returns the number of rows whose logits are computed at a time."""
    rows = _MAX_LOGITS_BYTES // (4 * vocab_size)
    rows = max(rows // _CHUNK_MULTIPLE, 1) * _CHUNK_MULTIPLE
    return min(rows, _MAX_CHUNK, num_rows)


def gathered_targets(
    is_target: Bool[Array, " T"], chunk: int
) -> tuple[Int[Array, "C R"], Int[Array, " T"]]:
    """Returns the numbers of the target rows in chunks, and each row's place in these.

    The last chunk that has one is filled up with row 0, and so are those after it.
    """
    t = len(is_target)
    # Without the barrier XLA would count again for every value that is gathered.
    place = jax.lax.optimization_barrier(jnp.cumsum(is_target) - 1)
    num_chunks = -(-t // chunk)
    source = jnp.zeros(num_chunks * chunk, jnp.int32)
    source = source.at[jnp.where(is_target, place, len(source))].set(
        jnp.arange(t, dtype=jnp.int32), mode="drop"
    )
    return source.reshape(num_chunks, chunk), place


def over_targets(compute, is_target, *rows, chunk: int):
    """Runs `compute` on the target rows, gathered to the front.

    All chunks have one shape, so the result for a row does not depend on how many other
    rows are targets. Chunks without a target are skipped.

    Returns:
        The results of `compute` for the gathered rows, and each row's place in them.
    """
    source, place = gathered_targets(is_target, chunk)
    num_targets = is_target.sum()

    def compute_rows(taken):
        return compute(*jax.tree.map(lambda x: x[taken], rows))

    def zeros(taken):
        like = jax.eval_shape(compute_rows, taken)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in like)

    def step(first, taken):
        outs = jax.lax.cond(first < num_targets, compute_rows, zeros, taken)
        return first + chunk, outs

    _, outs = jax.lax.scan(step, 0, source)
    outs = tuple(out.reshape(-1, *out.shape[2:]) for out in outs)
    return outs, jnp.maximum(place, 0)


def product(x: Array, head: Array, axis: int) -> Array:
    """Contracts the features of x with an axis of the head, without a copy of it."""
    dims = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, head, dims, preferred_element_type=jnp.float32)


def head_logits(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"] | Float[Array, "V D"],
    *,
    head_transposed: bool = False,
    logit_softcap: float | None = None,
    own: HeadRows | None = None,
) -> Float[Array, "T V"]:
    """Computes the logits of rows, in float32; for the arguments see `target_nll`."""
    logits = product(hidden, head, 1 if head_transposed else 0)
    if own is not None:
        logits = _with_own(logits, hidden, own, own.slots(len(hidden)), parts=1)
    return softcap(logits, logit_softcap)


def _with_own(logits, hidden, own: HeadRows, slots, parts: int):
    """Replaces the logits of the tokens of each row's slot."""
    num_slots, num_rows, _ = own.rows.shape
    rows = own.rows.astype(hidden.dtype).reshape(num_slots * num_rows, -1)
    of_all = product(hidden, rows, 1).reshape(-1, num_slots, num_rows)
    is_mine = slots[:, None] == jnp.arange(num_slots)
    new = jnp.where(is_mine[:, :, None], of_all, 0.0).sum(axis=1)
    place = _own_places(own, slots, logits.shape[1], parts)
    return logits.at[jnp.arange(len(logits))[:, None], place].set(new, mode="drop")


def _own_places(own: HeadRows, slots, size: int, parts: int) -> Int[Array, "T E"]:
    """Returns which logits are of the tokens of each row's slot; `size`: none here.

    Args:
        own: The rows.
        slots: Slot of each row of logits.
        size: Number of logits on each device.
        parts: Number of devices.
    """
    places, is_here = own_indices(own.ids.reshape(-1), size, parts)
    is_here &= own.ids.reshape(-1) >= 0
    by_slot = jnp.where(is_here, places, size).reshape(own.ids.shape)
    return jnp.where(slots[:, None] >= 0, by_slot[jnp.maximum(slots, 0)], size)


def _nll(hidden, head, labels, options: HeadOptions, own=None, slots: Any = None):
    logits = product(hidden, head, 1 if options.transposed else 0)
    if own is not None:
        logits = _with_own(logits, hidden, own, slots, options.parts)
    capped = logits = softcap(logits, options.softcap)
    soft = labels if isinstance(labels, SoftLabels) else None
    if soft is not None:
        logits = logits * soft.scale[:, None]
    ids = labels[:, None] if soft is None else soft.ids
    if options.parts > 1:
        log_total, picked = _of_all_parts(logits, ids, options.parts)
    else:
        log_total = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, ids, axis=-1)
    if soft is None:
        return log_total - picked[:, 0], capped, log_total
    terms = soft.shares * (log_total[:, None] - picked)
    return jnp.where(soft.shares > 0, terms, 0.0).sum(axis=1), capped, log_total


def _of_all_parts(logits, ids, parts: int):
    """Returns the log of each row's sum of exponentials, and its labels' logits."""
    own, is_own = (
        x.reshape(ids.shape)
        for x in own_indices(ids.reshape(-1), logits.shape[1], parts)
    )
    most = jax.lax.pmax(logits.max(axis=-1), TENSOR)
    total = jnp.exp(logits - most[:, None]).sum(axis=-1)
    picked = jnp.where(is_own, jnp.take_along_axis(logits, own, axis=-1), 0.0)
    both = jnp.concatenate([total[:, None], picked], axis=1)
    both = jax.lax.psum(both, TENSOR)
    return jnp.log(both[:, 0]) + most, both[:, 1:]


def nll_and_gradient(
    hidden, head, labels, options: HeadOptions, own=None, slots: Any = None
):
    """Returns each row's loss and `dlogits head^T`; see `nll_and_dlogits`.

    If slots have rows of their own, the third result is dlogits of the tokens of these.
    """
    nll, dlogits = nll_and_dlogits(hidden, head, labels, options, own, slots)
    axis = 0 if options.transposed else 1
    if own is None:
        gradient = product(dlogits.astype(head.dtype), head, axis)
        return nll, gradient.astype(hidden.dtype)
    place = _own_places(own, slots, dlogits.shape[1], options.parts)
    numbers = jnp.arange(len(dlogits))[:, None]
    of_own = dlogits.at[numbers, place].get(mode="fill", fill_value=0)
    frozen = dlogits.at[numbers, place].set(0, mode="drop")
    gradient = product(frozen.astype(head.dtype), head, axis)
    is_mine = (slots[:, None] == jnp.arange(len(own.rows)))[:, :, None]
    spread = jnp.where(is_mine, of_own[:, None], 0).reshape(len(dlogits), -1)
    # 0 times NaN would reach other slots; the loss of the slot itself is NaN.
    finite = jnp.where(jnp.isfinite(own.rows), own.rows, 0).astype(hidden.dtype)
    rows = finite.reshape(spread.shape[1], -1)
    gradient += product(spread.astype(hidden.dtype), rows, 0)
    return nll, gradient.astype(hidden.dtype), of_own


def nll_and_dlogits(
    hidden, head, labels, options: HeadOptions, own=None, slots: Any = None
):
    """Returns each row's loss, and its gradient by the logits, softmax - one hot.

    With `SoftLabels`, it is scale (softmax times the sum of shares - shares). A soft
    cap multiplies it by its slope, `1 - (logits / cap)^2`.
    """
    nll, logits, log_total = _nll(hidden, head, labels, options, own, slots)
    if isinstance(labels, SoftLabels):
        dlogits = _soft_dlogits(logits, log_total, labels, options.parts)
    else:
        first = first_index(logits.shape[1], options.parts)
        hit = jnp.arange(logits.shape[1]) == labels[:, None] - first
        dlogits = jnp.exp(logits - log_total[:, None]) - hit
    if options.softcap is not None:
        dlogits *= 1 - (logits / options.softcap) ** 2
    return nll, dlogits


def _soft_dlogits(logits, log_total, labels: SoftLabels, parts: int):
    num_logits, scale = logits.shape[1], labels.scale[:, None]
    own, is_own = own_indices(labels.ids.reshape(-1), num_logits, parts)
    place = jnp.where(is_own, own, num_logits).reshape(labels.ids.shape)
    numbers = jnp.arange(len(logits))[:, None]
    softmax = jnp.exp(logits * scale - log_total[:, None])
    dlogits = softmax * labels.shares.sum(axis=1, keepdims=True)
    # No two shares of a row are of one token, so the order of additions is no matter.
    return scale * dlogits.at[numbers, place].add(-labels.shares, mode="drop")

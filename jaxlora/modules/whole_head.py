"""Cross entropy by heads that slots train as a whole, each its own.

The rows of a slot are multiplied by its own head only. Slots share no chunks of rows,
so they do not reach each other, and a slot without rows in a microbatch costs no
product.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlora.modules.loss import (
    HeadOptions,
    SoftLabels,
    chunk_rows,
    gathered_targets,
    nll_and_dlogits,
    nll_and_gradient,
    over_targets,
    product,
)
from jaxlora.modules.scoring import softcap


class WholeHeads(NamedTuple):
    """Heads of slots, in the place of the frozen one.

    Attributes:
        table: The head of each slot, G V D.
        block_slots: Slot of each block of hidden states, NB; -1: it trains no head.
    """

    table: Array
    block_slots: Array

    def slots(self, num_rows: int) -> Int[Array, " T"]:
        """Returns the slot of each row of hidden states; -1: it trains no head."""
        return jnp.repeat(self.block_slots, num_rows // len(self.block_slots))


def with_whole_logits(
    logits: Float[Array, "T V"],
    hidden: Float[Array, "T D"],
    whole: WholeHeads,
    *,
    logit_softcap: float | None = None,
) -> Float[Array, "T V"]:
    """Replaces the logits of the rows whose slot trains a head."""
    slots = whole.slots(len(hidden))

    def with_slot(logits, given):
        number, head = given
        own = softcap(product(hidden, head.astype(hidden.dtype), 1), logit_softcap)
        return jnp.where((slots == number)[:, None], own, logits), None

    numbered = jnp.arange(len(whole.table)), whole.table
    return jax.lax.scan(with_slot, logits, numbered)[0]


def whole_nll(
    hidden: Float[Array, "T D"],
    whole: WholeHeads,
    labels: Int[Array, " T"] | SoftLabels,
    is_target: Bool[Array, " T"],
    *,
    logit_softcap: float | None = None,
) -> Float[Array, " T"]:
    """Negative log likelihood of labels where the slot trains a head; 0 elsewhere.

    The gradient of hidden is computed with the loss, as in `target_nll`. That of the
    heads needs the cotangent, so the backward pass computes the logits once more: a
    product with a V D matrix is cheaper than to keep T x V.

    Args:
        hidden: Hidden states after the last norm.
        whole: The heads.
        labels: As for `target_nll`.
        is_target: Which rows are trained on.
        logit_softcap: Bound of the logits; None: there is none.
    """
    options = HeadOptions(transposed=True, softcap=logit_softcap)
    slots = whole.slots(len(hidden))

    @jax.custom_vjp
    def run(hidden, table):
        return over_slots(_losses, hidden, table)[0]

    def over_slots(compute: Any, hidden: Array, table: Array) -> tuple[Array, ...]:
        return _over_slots(compute, hidden, table, labels, is_target, slots, options)

    def forward(hidden, table):
        nll, gradient = over_slots(nll_and_gradient, hidden, table)
        return nll, (hidden, table, gradient)

    def backward(kept, dnll):
        hidden, table, gradient = kept
        is_mine = is_target & (slots >= 0)
        dhidden = (gradient * dnll[:, None]).astype(gradient.dtype)
        rows = hidden, labels, dnll
        dtable = _table_gradients(rows, table, is_target, slots, options)
        return jnp.where(is_mine[:, None], dhidden, 0), dtable

    run.defvjp(forward, backward)
    return run(hidden, whole.table)


def _losses(hidden, head, labels, options: HeadOptions):
    return (nll_and_dlogits(hidden, head, labels, options)[0],)


def _over_slots(compute, hidden, table, labels, is_target, slots, options: HeadOptions):
    """Runs `compute` on the target rows of each slot with its head; 0 elsewhere."""
    chunk = chunk_rows(table.shape[1], len(hidden))

    def of_slot(number, head):
        head, is_mine = head.astype(hidden.dtype), is_target & (slots == number)

        def of_chunk(hidden, labels):
            return compute(hidden, head, labels, options)

        outs, place = over_targets(of_chunk, is_mine, hidden, labels, chunk=chunk)
        return tuple(out[place] for out in outs)

    def step(outs, given):
        number, head = given
        is_mine = is_target & (slots == number)

        def replaced():
            new = of_slot(number, head)
            return tuple(
                jnp.where(is_mine.reshape(-1, *[1] * (x.ndim - 1)), x, y)
                for x, y in zip(new, outs, strict=True)
            )

        return jax.lax.cond(is_mine.any(), replaced, lambda: outs), None

    like = jax.eval_shape(of_slot, 0, table[0])
    zeros = tuple(jnp.zeros(x.shape, x.dtype) for x in like)
    return jax.lax.scan(step, zeros, (jnp.arange(len(table)), table))[0]


def _table_gradients(rows, table, is_target, slots, options: HeadOptions):
    """Returns the gradients of the heads, summed by chunks of each slot's own rows.

    Args:
        rows: Hidden states, labels, and cotangents of the losses.
        table: The heads.
        is_target: Which rows are trained on.
        slots: Slot of each row; -1: it trains no head.
        options: How the heads make logits.
    """
    hidden, _, _ = rows
    chunk = chunk_rows(table.shape[1], len(hidden))

    def of_slot(number, head):
        is_mine = is_target & (slots == number)
        (source, _), count = gathered_targets(is_mine, chunk), is_mine.sum()
        own = head.astype(hidden.dtype)

        def add(i, total):
            x, labels, dnll = jax.tree.map(lambda values: values[source[i]], rows)
            is_row = (i * chunk + jnp.arange(chunk) < count)[:, None]
            x = jnp.where(is_row, x, 0)
            _, dlogits = nll_and_dlogits(x, own, labels, options)
            dlogits = jnp.where(is_row, dlogits * dnll[:, None], 0)
            return total + jax.lax.dot_general(
                dlogits.astype(hidden.dtype),
                x,
                (((0,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )

        zeros = jnp.zeros(head.shape, jnp.float32)
        return jax.lax.fori_loop(0, -(-count // chunk), add, zeros)

    def step(_, given):
        return None, of_slot(*given)

    _, gradients = jax.lax.scan(step, None, (jnp.arange(len(table)), table))
    return gradients.astype(table.dtype)

"""DoRA for every back end: a gain of each output feature, applied after the kernels.

DoRA (arXiv 2402.09353) computes `c (x W + scaling x A B) + bias`, where c is, for each
output feature, a trained magnitude over the norm of its column of W + scaling A B. With
the output y of LoRA, which any back end computes, that is `y + (c - 1) (y - bias)`: one
pass over y. The gain c - 1 is a value of each slot, and rows of slots without DoRA are
passed on as they are.

With dropout, PEFT also drops features of the product with W that c scales:
`x W + bias + (c - 1) d W + c scaling d A B` with d = dropout(x). That is
`y + (c - 1) z`, where z = d (W + scaling A B) takes a second product with W.
"""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlora.pallas_kernels.dropout import Dropout
from jaxlora.pallas_kernels.given_mask import GivenMask

# The square of a norm is a sum of terms of both signs, each with the rounding of
# float32. Below this share of the positive ones, it would be noise, or negative.
_LEAST_SHARE = 2.0**-20


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DoraGain:
    """The gains of a linear's output features, by slot.

    Attributes:
        gain: c - 1, which has a gradient; not read where `is_used` is false.
        is_used: Whether the slot has DoRA.
        drops: Whether the slot has DoRA and drops features, which takes a second
            product with W in its rows; None: no slot does.
    """

    gain: Float[Array, "G N"]
    is_used: Bool[Array, " G"]
    drops: Bool[Array, " G"] | None = None


def column_norms(
    w: Float[Array, "K N"],
    a: Float[Array, "G K R"],
    b: Float[Array, "G R N"],
    scaling: Float[Array, " G"],
    *,
    total: Callable[[Any], Any] = lambda sums: sums,
) -> Float[Array, "G N"]:
    """Returns the norm of each column of `W + scaling A B`, in float32.

    The sum is never formed: the square of a norm is that of W's column, plus twice the
    product of the columns of W and scaling A B, plus a form of A's Gram matrix. If A B
    cancels all but a thousandth of a column of W, the norm of what is left is lost in
    rounding, and the result is a lower bound of about that size.

    Args:
        w: Frozen weight, in the dtype of the products.
        a: Shrink matrices, which are rounded to w's dtype, as in the products.
        b: Expand matrices, rounded likewise.
        scaling: Factor of A B of each slot.
        total: Adds sums over K to those of other devices, if K is divided among them.
    """
    a, b = a.astype(w.dtype), b.astype(w.dtype)
    squares = jnp.square(w.astype(jnp.float32)).sum(axis=0)[None]
    b_float, factor = b.astype(jnp.float32), scaling.astype(jnp.float32)[:, None]
    cross = (_einsum("gkr,kn->grn", a, w) * b_float).sum(axis=1)
    gram = _einsum("gkr,gkq->grq", a, a)
    squares, cross, gram = total((squares, cross, gram))
    own = (_einsum("grq,gqn->grn", gram, b_float) * b_float).sum(axis=1)
    positive = squares + jnp.square(factor) * own
    return jnp.sqrt(jnp.maximum(positive + 2 * factor * cross, _LEAST_SHARE * positive))


def _einsum(spec: str, one: Array, other: Array) -> Array:
    # GPUs would round float32 to fewer bits.
    exact = jax.lax.Precision.HIGHEST if one.dtype == jnp.float32 else None
    return jnp.einsum(
        spec, one, other, precision=exact, preferred_element_type=jnp.float32
    )


def dora_gain(
    magnitude: Float[Array, "G N"],
    norms: Float[Array, "G N"],
    drops: Bool[Array, " G"] | None = None,
) -> DoraGain:
    """Returns the gains of magnitudes over norms.

    A column of zeros has no direction to scale, so its gain is 0.

    Args:
        magnitude: Trained magnitudes; those of a slot without DoRA are all 0.
        norms: The norms of the columns, of which no gradient is computed, as in
            section 4.3 of the paper.
        drops: Whether the slot drops features; None: no slot does.
    """
    norms = jax.lax.stop_gradient(norms)
    is_used = (magnitude != 0).any(axis=1)
    has_gain = is_used[:, None] & (norms != 0)
    inverse = 1 / jnp.where(has_gain, norms, 1.0)
    return DoraGain(
        gain=jnp.where(has_gain, magnitude * inverse - 1, 0.0),
        is_used=is_used,
        drops=None if drops is None else is_used & drops,
    )


# ---- in the op -----------------------------------------------------------------------


@jax.custom_vjp
def dropped(
    x: Float[Array, "T K"], dropout: Dropout | GivenMask, slot: Int[Array, " NB"]
) -> Float[Array, "T K"]:
    """Returns x after dropout; the mask is computed again for the gradient."""
    keep = dropout.keep(slot, x.shape)
    factor = dropout.inverse_keep[slot][:, None, None]
    blocks = x.reshape(keep.shape).astype(jnp.float32)
    return jnp.where(keep, blocks * factor, 0).astype(x.dtype).reshape(x.shape)


def _dropped_forward(x, dropout, slot):
    return dropped(x, dropout, slot), (dropout, slot)


def _dropped_backward(residuals, dx):
    return dropped(dx, *residuals), None, None


dropped.defvjp(_dropped_forward, _dropped_backward)


@jax.custom_vjp
def apply_gain(
    y: Float[Array, "T N"],
    z: Float[Array, "T N"] | None,
    bias: Float[Array, " N"] | None,
    dora: DoraGain,
    block_adapter: Int[Array, " NB"],
) -> Float[Array, "T N"]:
    """Returns `y + gain z` in y's dtype; rows of slots without DoRA stay as they are.

    Args:
        y: The output of LoRA.
        z: What the gains multiply in slots that drop features; in the others it is
            y - bias. None: no slot drops any.
        bias: Frozen bias, which is in y.
        dora: The gains.
        block_adapter: The slot of each token block; -1 for padding.
    """
    rows = _Rows(y, z, bias, dora, block_adapter)
    scaled = rows.y + rows.gain * rows.z
    return jnp.where(rows.is_used, scaled, rows.y).astype(y.dtype).reshape(y.shape)


def _gain_forward(*arguments):
    return apply_gain(*arguments), arguments


def _gain_backward(arguments, dy):
    y, z, _, dora, block_adapter = arguments
    rows = _Rows(*arguments)
    dy_B = rows.split(dy)
    through = rows.gain * dy_B
    of_y = jnp.where(rows.is_used & ~rows.drops, dy_B + through, dy_B)
    of_z = None
    if z is not None:
        of_z = jnp.where(rows.drops, through, 0).astype(z.dtype).reshape(z.shape)
    of_gain_B = (dy_B * rows.z).sum(axis=1)
    mine = block_adapter == jnp.arange(dora.gain.shape[0])[:, None]
    mine &= dora.is_used[:, None]
    of_gain = jnp.where(mine[:, :, None], of_gain_B[None], 0).sum(axis=1)
    frozen: Any = None
    gradient = DoraGain(gain=of_gain.astype(dora.gain.dtype), is_used=frozen)
    return of_y.astype(y.dtype).reshape(y.shape), of_z, None, gradient, None


apply_gain.defvjp(_gain_forward, _gain_backward)


class _Rows:
    """The arguments of `apply_gain` by token block, in float32."""

    def __init__(self, y, z, bias, dora: DoraGain, block_adapter):
        slot = jnp.maximum(block_adapter, 0)
        is_live = (block_adapter >= 0)[:, None, None]
        self._num_blocks = slot.shape[0]
        self.y = self.z = self.split(y)
        self.gain = dora.gain.astype(jnp.float32)[slot][:, None]
        self.is_used = dora.is_used[slot][:, None, None] & is_live
        self.drops = jnp.zeros_like(self.is_used)
        if bias is not None:
            self.z = self.y - bias.astype(jnp.float32)[None, None]
        if z is not None:
            assert dora.drops is not None
            self.drops = dora.drops[slot][:, None, None] & is_live
            self.z = jnp.where(self.drops, self.split(z), self.z)

    def split(self, rows: Float[Array, "T N"]) -> Float[Array, "NB BT N"]:
        blocks = rows.reshape(self._num_blocks, -1, rows.shape[1])
        return blocks.astype(jnp.float32)

"""Causal attention over packed rows."""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlora.modules.banded_attention import banded_attention
from jaxlora.modules.cudnn_attention import DETERMINISTIC, cudnn_attention
from jaxlora.modules.length_classes import SegmentLengths
from jaxlora.modules.scoring import PLAIN, Scoring
from jaxlora.modules.triton_attention import triton_attention

AttentionImplementation = Literal["xla", "cudnn", "triton"]


class WideHeads(NamedTuple):
    """Attention of the layers whose heads are wider than those of the others.

    Attributes:
        features: Features of their heads.
        implementation: Their implementation of attention.
    """

    features: int
    implementation: AttentionImplementation


# The product of two smaller values, summed over head_dim, is finite in float32. Larger
# values could give infinity for a masked pair of rows, and 0 * infinity is NaN.
_LIMIT = 2.0**56


def compiler_options(implementation: AttentionImplementation) -> dict[str, bool]:
    """Returns compiler options that make attention's gradient deterministic."""
    return dict(DETERMINISTIC) if implementation == "cudnn" else {}


def _is_sound(x: Float[Array, "*B"]) -> Bool[Array, "*B"]:
    """Tells where x is neither NaN nor so large that its sample must have diverged."""
    return jnp.abs(x.astype(jnp.float32)) < _LIMIT


@jax.custom_vjp
def _sound(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Replaces what is not sound by zero, so that 0 * x is 0; keeps the gradient."""
    return jnp.where(_is_sound(x), x, 0)


_sound.defvjp(lambda x: (_sound(x), None), lambda _, dx: (dx,))


@jax.custom_vjp
def _sound_gradient(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Returns x, and replaces what is not sound in its gradient by zero."""
    return x


_sound_gradient.defvjp(lambda x: (x, None), lambda _, dx: (_sound(dx),))


def packed_attention(
    q: Float[Array, "T H E"],
    k: Float[Array, "T HK E"],
    v: Float[Array, "T HK E"],
    segment_ids: Int[Array, " T"],
    *,
    lengths: SegmentLengths,
    scoring: Scoring = PLAIN,
    sinks: Float[Array, " H"] | None = None,
    implementation: AttentionImplementation = "xla",
) -> Float[Array, "T H E"]:
    """Causal attention in which a row sees the earlier rows of its own segment only.

    A number that is not finite, or 2**56 or more in magnitude, means that its adapter
    diverged. It affects no other segment, forward or backward. In q, k or v it makes
    the output of its own row NaN. For the other rows of its segment, and in the
    gradient of the output, it counts as zero.

    Args:
        q: Queries; H is a multiple of HK (grouped-query attention).
        k: Keys.
        v: Values.
        segment_ids: Segment of each row; the rows of a segment are contiguous. Padding
            rows are negative and get zeros.
        lengths: Lengths of the segments. `cudnn` has room for one and a half times as
            many short segments as the mean gives, see `shortest_class`.
        scoring: Settings of the scores.
        sinks: Score of one more key for each head, which all rows see and whose value
            is zero. It takes no gradient. None: there is none.
        implementation: `xla` runs anywhere. `cudnn` runs where `cudnn_unsupported`
            names no reason against it, in programs compiled with `compiler_options`.
            `triton` runs where `triton_unsupported` names none.

    Raises:
        ValueError: There is no such implementation.
    """
    choices = get_args(AttentionImplementation)
    if implementation not in choices:
        raise ValueError(
            f"implementation={implementation!r} is unknown; there is: "
            f"{', '.join(choices)}."
        )
    own = _is_sound(q).all((1, 2)) & _is_sound(k).all((1, 2))
    own &= _is_sound(v).all((1, 2))
    q, k, v = _sound(q), _sound(k), _sound(v)
    if sinks is not None:
        sinks = jax.lax.stop_gradient(sinks)
    if implementation == "cudnn":
        out = cudnn_attention(q, k, v, own, segment_ids, lengths, scoring, sinks)
    elif implementation == "triton":
        out = triton_attention(q, k, v, own, segment_ids, lengths, scoring, sinks)
    else:
        out = banded_attention(q, k, v, segment_ids, lengths.longest, scoring, sinks)
        out = jnp.where(own[:, None, None], out, jnp.nan)
    return _sound_gradient(out)

"""Packed rows for the tests of attention, and attention by its definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.modules.attention import compiler_options, packed_attention
from jaxlora.modules.length_classes import SegmentLengths
from jaxlora.modules.scoring import PLAIN
from tests.drawn import Draws

MEAN = 8  # tokens of a sample: cuDNN gets room for many short ones
# Values in a row of a diverged sample, of which some are finite but too large for a
# product, and the tensors that hold them at once.
BAD = [np.nan, np.inf, 1e20, -1e30, 3e38]
LARGEST = 7e16  # magnitude that does not count as diverged
WHERE = ["q", "k", "v", "dout", "q k", "q k v", "q k v dout"]
# Each tensor, with a value that is no number and with the largest; each value, in all
# tensors at once. The other products run before a release.
WHERE_AND_BAD = [
    pytest.param(where, bad, marks=() if is_always else pytest.mark.grid)
    for where in WHERE
    for bad in BAD
    for is_always in [bad in (BAD[0], BAD[-1]) or where == WHERE[-1]]
]
# Below, among and above the scores: they take nearly nothing, some, and nearly all.
SINKS = (-30.0, 0.5, 2.0, 40.0)
PIECES = [(50, 0), (7, 0), (90, 6), (16, 0), (64, 20), (30, 0), (3, 0)]


def layout(pieces, rows):
    """Returns segment_ids, and (start, end) of each segment that fits."""
    ids, spans, at = np.full(rows, -1, np.int32), [], 0
    for tokens, padding in pieces:
        if at + tokens > rows:
            break
        ids[at : at + tokens] = len(spans)
        spans.append((at, at + tokens))
        at += tokens + padding
    return jnp.array(ids), spans


def dense(q, k, v, segment_ids, scoring=PLAIN, sinks=None):
    """The definition, of T x T and in float32."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    back = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
    seen = (segment_ids[:, None] == segment_ids) & (back >= 0)
    seen &= back < (scoring.window or len(q))
    scale = scoring.scale or 1 / jnp.sqrt(q.shape[-1])
    scores = jnp.einsum("qhe,khe->hqk", q, k) * scale
    if scoring.softcap is not None:
        scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        more = jnp.broadcast_to(
            jnp.asarray(sinks)[:, None, None], scores[..., :1].shape
        )
        scores = jnp.concatenate([scores, more], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : len(q)]
    out = jnp.einsum("hqk,khe->qhe", weights, v)
    return jnp.where((segment_ids >= 0)[:, None, None], out, 0)


def problem(rows, heads, kv_heads, e, dtype, seed=0):
    """Returns q, k, v and the gradient of the output."""
    draws = Draws(seed)
    numbers = heads, kv_heads, kv_heads, heads
    return [draws.normal(rows, n, e, dtype=dtype) for n in numbers]


def both_ways(attend, q, k, v, dout):
    """Returns (out, dq, dk, dv)."""
    out, vjp = jax.vjp(attend, q, k, v)
    return out, *vjp(dout.astype(out.dtype))


@functools.cache
def compiled(implementation, longest, scoring=PLAIN, sinks=None):
    """Returns (q, k, v, dout, ids) -> (out, dq, dk, dv), compiled as in training."""

    def run(q, k, v, dout, ids):
        attend = functools.partial(
            packed_attention,
            segment_ids=ids,
            lengths=SegmentLengths(longest, MEAN),
            scoring=scoring,
            sinks=None if sinks is None else jnp.asarray(sinks),
            implementation=implementation,
        )
        return both_ways(attend, q, k, v, dout)

    return jax.jit(run, compiler_options=compiler_options(implementation))


@functools.cache
def compiled_dense(scoring=PLAIN, sinks=None):
    """Returns the same function by definition."""

    def run(q, k, v, dout, ids):
        attend = functools.partial(dense, segment_ids=ids, scoring=scoring, sinks=sinks)
        return both_ways(attend, q, k, v, dout)

    return jax.jit(run)


def check_isolation(numbers, ids, spans, run, where, value):
    """Checks that a bad row of segment 2 changes no other segment.

    Args:
        numbers: q, k, v and dout.
        ids: Segment of each row.
        spans: (start, end) of each segment.
        run: Computes (out, dq, dk, dv) from numbers and ids.
        where: Which of the numbers change in `sick_row`; one of `WHERE`.
        value: Their value there.

    Returns:
        (out, dq, dk, dv) with the bad row.
    """
    row, (start, end) = sick_row(spans), spans[2]
    others = np.ones(len(ids), bool)
    others[start:end] = False
    names = where.split()
    sick = [
        x.at[row].set(value) if name in names else x
        for name, x in zip(("q", "k", "v", "dout"), numbers, strict=True)
    ]
    clean, got = run(*numbers, ids), run(*sick, ids)
    for actual, wanted in zip(got, clean, strict=True):
        pair = (np.asarray(x, np.float32)[others] for x in (actual, wanted))
        np.testing.assert_array_equal(*pair)
    return got


def check_bad_row(numbers, ids, spans, run, where, bad):
    """Checks isolation, and that the bad row's own output is NaN."""
    got = check_isolation(numbers, ids, spans, run, where, bad)
    if where != "dout":
        out = np.asarray(got[0], np.float32)
        assert np.isnan(out[sick_row(spans)]).all(), "the divergence is hidden"


def sick_row(spans):
    """Returns a row of segment 2 that a tile of segment 0 would reach."""
    return spans[2][0] + 20

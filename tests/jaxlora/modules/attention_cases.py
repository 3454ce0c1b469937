"""Packed rows for attention's tests, and what becomes of them by definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.modules.attention import compiler_options, packed_attention

MEAN = 8  # tokens of a sample: cuDNN gets room for many short ones
PIECES = [(50, 0), (7, 0), (90, 6), (16, 0), (64, 20), (30, 0), (3, 0)]


def layout(pieces, rows):
    """segment_ids, and (start, end) of each segment that fits in."""
    ids, spans, at = np.full(rows, -1, np.int32), [], 0
    for tokens, padding in pieces:
        if at + tokens > rows:
            break
        ids[at : at + tokens] = len(spans)
        spans.append((at, at + tokens))
        at += tokens + padding
    return jnp.array(ids), spans


def dense(q, k, v, segment_ids, window=None):
    """The definition, of T x T and in float32."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    back = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
    seen = (segment_ids[:, None] == segment_ids) & (back >= 0)
    seen &= back < (window or len(q))
    scores = jnp.einsum("qhe,khe->hqk", q, k) / jnp.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("hqk,khe->qhe", weights, v)
    return jnp.where((segment_ids >= 0)[:, None, None], out, 0)


def problem(rows, heads, kv_heads, e, dtype, seed=0):
    """q, k, v and the gradient of the output."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((rows, n, e) for n in (heads, kv_heads, kv_heads, heads))
    return [jax.random.normal(*z, dtype) for z in zip(keys, shapes, strict=True)]


def both_ways(attend, q, k, v, dout):
    """(out, dq, dk, dv)."""
    out, vjp = jax.vjp(attend, q, k, v)
    return out, *vjp(dout.astype(out.dtype))


@functools.cache
def compiled(implementation, longest, window):
    """(q, k, v, dout, ids) -> (out, dq, dk, dv), compiled as a training step is."""

    def run(q, k, v, dout, ids):
        attend = functools.partial(
            packed_attention,
            segment_ids=ids,
            max_segment_tokens=longest,
            mean_segment_tokens=MEAN,
            window=window,
            implementation=implementation,
        )
        return both_ways(attend, q, k, v, dout)

    return jax.jit(run, compiler_options=compiler_options(implementation))


@functools.cache
def compiled_dense(window):
    """The same by definition."""

    def run(q, k, v, dout, ids):
        attend = functools.partial(dense, segment_ids=ids, window=window)
        return both_ways(attend, q, k, v, dout)

    return jax.jit(run)


def check_isolation(numbers, ids, spans, run, which, bad):
    """A row of segment 2 that is not finite changes that segment only.

    The row lies where a tile of segment 0 would reach.
    """
    start, end = spans[2]
    others = np.ones(len(ids), bool)
    others[start:end] = False
    sick = list(numbers)
    at = ["q", "k", "v", "dout"].index(which)
    sick[at] = sick[at].at[start + 20].set(bad)
    clean, got = run(*numbers, ids), run(*sick, ids)
    for actual, wanted in zip(got, clean, strict=True):
        pair = (np.asarray(x, np.float32)[others] for x in (actual, wanted))
        np.testing.assert_array_equal(*pair)
    if which != "dout":
        assert np.isnan(np.asarray(got[0], np.float32)[start + 20]).all(), "hidden"

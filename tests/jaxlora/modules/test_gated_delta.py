"""The gated delta rule in chunks equals the recurrence, step by step in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.models.config import DeltaShape
from jaxlora.modules.gated_delta import (
    DeltaInputs,
    DeltaWeights,
    cached_gated_delta,
    empty_delta_cache,
    gated_delta_rule,
    gated_norm,
    packed_gated_delta,
    short_convolution,
)
from tests.oracle import relative_error

# Lengths of samples; negative: padding. Some begin inside a chunk of 64, some at its
# start, and some run through several.
RAGGED = (1, 30, 3, -7, 64, 100, 2, -5, 140, 1, 39)
SHAPE = DeltaShape(
    num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=8, conv_width=4
)


def segments_of(lengths):
    numbers = [i if n > 0 else -1 for i, n in enumerate(lengths)]
    return jnp.asarray(np.repeat(np.array(numbers, np.int32), np.abs(lengths)))


def recurrence(q, k, v, g, beta, segment_ids):
    """The definition, in float64, one row after the other."""
    q, k, v, g, beta = (np.float64(x) for x in (q, k, v, g, beta))
    segment_ids = np.asarray(segment_ids)
    num, (heads, size), (values, width) = len(q), q.shape[1:], v.shape[1:]
    q, k = (np.repeat(x, values // heads, axis=1) for x in (q, k))
    out, state, before = np.zeros((num, values, width)), None, None
    for t in range(num):
        if segment_ids[t] < 0:
            continue
        if segment_ids[t] != before:
            state, before = np.zeros((values, size, width)), segment_ids[t]
        state = state * np.exp(g[t])[:, None, None]
        error = v[t] - np.einsum("hk,hke->he", k[t], state)
        state += k[t][:, :, None] * (beta[t][:, None] * error)[:, None]
        out[t] = np.einsum("hk,hke->he", q[t], state) * size**-0.5
    return out


def stepped(q, k, v, g, beta, starts):
    """The same for JAX, in the dtype of the arrays, so that it has a gradient."""
    repeats, size = v.shape[1] // q.shape[1], q.shape[2]
    q, k = (jnp.repeat(x, repeats, axis=1) for x in (q, k))

    def step(state, row):
        q, k, v, g, beta, is_start = row
        state = jnp.where(is_start, 0, state) * jnp.exp(g)[:, None, None]
        error = beta[:, None] * (v - jnp.einsum("hk,hke->he", k, state))
        state += k[:, :, None] * error[:, None]
        return state, jnp.einsum("hk,hke->he", q, state) * size**-0.5

    state = jnp.zeros((v.shape[1], size, v.shape[2]), v.dtype)
    return jax.lax.scan(step, state, (q, k, v, g, beta, starts))[1]


def drawn(num, *, alike=0.0, decay=1.0, beta=None, seed=0):
    """Inputs of the rule.

    Args:
        num: Number of rows.
        alike: Share of a common direction in the keys.
        decay: Factor of the logarithms of the decays.
        beta: Share that is corrected; None: random.
        seed: Seed.
    """
    rng = np.random.default_rng(seed)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    keys = (num, SHAPE.num_key_heads, SHAPE.key_dim)
    gates = (num, SHAPE.num_value_heads)
    k = (1 - alike) * unit(rng.normal(size=keys)) + alike * unit(rng.normal(size=16))
    betas = rng.uniform(size=gates) if beta is None else np.full(gates, beta)
    return [
        jnp.asarray(x, jnp.float32)
        for x in (
            unit(rng.normal(size=keys)),
            unit(k),
            rng.normal(size=(*gates, SHAPE.value_dim)),
            -decay * np.exp(rng.normal(size=gates) - 1),
            betas,
        )
    ]


KINDS = {
    "random": {},
    "alike keys without decay": {"alike": 0.8, "decay": 0.0, "beta": 1.0},
    "the same key": {"alike": 1.0, "decay": 0.1, "beta": 0.99},
    "strong decay": {"decay": 100.0},
    "weak decay": {"decay": 1e-3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [64, 16])
def test_chunks_equal_the_recurrence(kind, chunk):
    segments = segments_of(RAGGED)
    given = drawn(len(segments), **KINDS[kind])
    run = jax.jit(gated_delta_rule, static_argnames="chunk_tokens")
    actual = run(*given, segments, chunk_tokens=chunk)
    assert relative_error(actual, recurrence(*given, segments)) < 3e-6


@jax.jit
@jax.grad
def _wanted(given, weights, starts):
    return (stepped(*given, starts) * weights).sum()


@jax.jit
@jax.grad
def _actual(given, weights, segments):
    return (gated_delta_rule(*given, segments) * weights).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_the_recurrence(kind):
    segments = segments_of((50, 20, 90))
    given = drawn(len(segments), **KINDS[kind])
    weights = np.random.default_rng(1).normal(size=given[2].shape)
    starts = np.concatenate([[True], np.diff(segments) != 0])

    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in given]
        wanted = _wanted(wide, jnp.asarray(weights), jnp.asarray(starts))
    actual = _actual(given, jnp.asarray(weights, jnp.float32), segments)
    for ours, theirs in zip(actual, wanted, strict=True):
        assert relative_error(ours, theirs) < 1e-4


def layer_inputs(num, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    heads, mixed = SHAPE.num_value_heads, SHAPE.mixed_features
    given = DeltaInputs(draw(num, mixed), draw(num, heads), draw(num, heads))
    return given, DeltaWeights(draw(mixed, 4) / 2, draw(heads), draw(heads))


@jax.jit
def whole(given, weights, segments):
    return packed_gated_delta(given, weights, SHAPE, segments, block_tokens=32)


def test_a_sample_has_the_bits_that_it_has_beside_others():
    """A job's blocks have the same rows, and the others' rows change, or are NaN."""
    segments = segments_of((40, -24, 50, 14))
    given, weights = layer_inputs(len(segments))
    others, _ = layer_inputs(len(segments), seed=1)
    own = slice(64, 128)
    run = jax.jit(jax.value_and_grad(lambda *x: (whole(*x) ** 2)[own].sum()))
    wanted, gradient = run(given, weights, segments)
    for row in (others, jax.tree.map(lambda x: x * np.nan, others)):
        mixed = jax.tree.map(lambda x, y: y.at[own].set(x[own]), given, row)
        out = whole(mixed, weights, segments)
        np.testing.assert_array_equal(out[own], whole(given, weights, segments)[own])
        found, other = run(mixed, weights, segments)
        assert found == wanted
        for ours, theirs in zip(other, gradient, strict=True):
            np.testing.assert_array_equal(ours[own], theirs[own])


def alone(given, weights, rows, total):
    """A sample's output where it is the only one, from the first row on."""
    length = rows.stop - rows.start
    pad = lambda x: jnp.pad(x[rows], ((0, total - length), (0, 0)))
    segments = jnp.where(jnp.arange(total) < length, 0, -1)
    return whole(jax.tree.map(pad, given), weights, segments)[:length]


def test_samples_alone_equal_samples_together():
    lengths = (5, 70, 1, -3, 49)
    segments = segments_of(lengths)
    given, weights = layer_inputs(len(segments))
    together = whole(given, weights, segments)
    ends = np.cumsum(np.abs(lengths))
    for end, length in zip(ends, lengths, strict=True):
        if length > 0:
            rows = slice(end - length, end)
            found = alone(given, weights, rows, len(segments))
            assert relative_error(together[rows], found) < 3e-6


def test_generation_carries_rows_and_state():
    """Padded prompts in two parts, then a row by itself, equal whole samples."""
    num, lengths = 128, np.array([127, 60, 3])
    given, weights = layer_inputs(3 * num)
    by_sequence = jax.tree.map(lambda x: x.reshape(3, num, *x.shape[1:]), given)
    cache = empty_delta_cache(SHAPE, 3, jnp.dtype(jnp.float32))
    run = jax.jit(cached_gated_delta, static_argnums=2)
    made = [[], [], []]
    for begins, size in (([0, 0, 0], 77), ([77, 77, 77], 50), (lengths, 1)):
        part = jax.tree.map(
            lambda x, begins=begins, size=size: jnp.concatenate(
                [own[i : i + size] for own, i in zip(x, begins, strict=True)]
            ),
            by_sequence,
        )
        num_new = np.clip(lengths - begins, 0, size) if size > 1 else np.ones(3, int)
        out, cache = run(part, weights, SHAPE, cache, jnp.asarray(num_new, jnp.int32))
        for own, rows, n in zip(made, jnp.split(out, 3), num_new, strict=True):
            own.append(rows[:n])
    for i, length in enumerate(lengths.tolist()):
        one = jax.tree.map(lambda x, i=i: x[i], by_sequence)
        found = alone(one, weights, slice(0, length + 1), num)
        assert relative_error(jnp.concatenate(made[i]), found) < 3e-6


def test_convolution_and_norm_equal_their_definitions():
    segments = segments_of((1, 2, 9, -4, 7))
    rng = np.random.default_rng(0)
    x, taps = rng.normal(size=(len(segments), 6)), rng.normal(size=(6, 4))
    wanted = np.zeros_like(x)
    for t in range(len(x)):
        for back in range(min(4, t + 1)):
            if segments[t - back] == segments[t]:
                wanted[t] += x[t - back] * taps[:, 3 - back]
    wanted /= 1 + np.exp(-wanted)
    x32, taps32 = (jnp.asarray(y, jnp.float32) for y in (x, taps))
    assert relative_error(short_convolution(x32, taps32, segments), wanted) < 1e-6
    heads, gate = rng.normal(size=(2, 5, 3, 8))
    scale = rng.normal(size=8)
    normed = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-2) * scale
    wanted = normed * gate / (1 + np.exp(-gate))
    given = (jnp.asarray(y, jnp.float32) for y in (heads, gate, scale))
    assert relative_error(gated_norm(*given, 1e-2), wanted) < 1e-6

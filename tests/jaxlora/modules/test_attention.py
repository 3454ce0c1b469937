"""Compares `packed_attention` with softmax attention of each sample alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxlora.modules import banded_attention
from jaxlora.modules.attention import packed_attention
from jaxlora.modules.length_classes import SegmentLengths
from jaxlora.modules.scoring import Scoring
from tests.drawn import Draws, normal
from tests.jaxlora.modules.attention_cases import (
    BAD,
    LARGEST,
    PIECES,
    SINKS,
    WHERE,
    WHERE_AND_BAD,
    both_ways,
    check_bad_row,
    check_isolation,
    compiled,
    compiled_dense,
    layout,
    problem,
    sick_row,
)
from tests.oracle import assert_as_accurate_as, relative_error

H, HK, E = 4, 2, 8
LENGTHS = (37, 1, 90, 16, 64)  # then padding
T = 256


def inputs(seed=0):
    draws = Draws(seed)
    return tuple(draws.normal(T, heads, E) for heads in (H, HK, HK))


def segments():
    ids = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    return jnp.array(np.pad(ids, (0, T - len(ids)), constant_values=-1))


def alone(q, k, v, window):
    """Computes dense attention of one sample in float64."""
    q, k, v = (np.asarray(z, np.float64) for z in (q, k, v))
    k, v = (np.repeat(z, H // HK, axis=1) for z in (k, v))
    scores = np.einsum("qhe,khe->hqk", q, k) / np.sqrt(E)
    back = np.arange(len(q))[:, None] - np.arange(len(q))
    seen = (back >= 0) & (back < (window or len(q)))
    weights = np.where(seen, np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khe->qhe", weights, v)


@pytest.mark.parametrize("window", [None, 5, 1, 40])
@pytest.mark.parametrize("longest", [90, 200, T, 1000])
def test_each_sample_as_if_alone(window, longest):
    q, k, v = inputs()
    attend = functools.partial(
        packed_attention,
        lengths=SegmentLengths(longest),
        scoring=Scoring(window=window),
    )
    actual = np.asarray(jax.jit(attend)(q, k, v, segments()))
    q, k, v = map(np.asarray, (q, k, v))
    starts = np.cumsum((0, *LENGTHS))
    for start, end in itertools.pairwise(starts):
        rows = slice(start, end)
        wanted = alone(q[rows], k[rows], v[rows], window)
        assert relative_error(actual[rows], wanted) < 2e-6
    assert not actual[starts[-1] :].any()


@pytest.mark.parametrize("window", [None, 16])
def test_sinks_are_keys_without_values(window):
    scoring = Scoring(window=window)
    numbers, ids = problem(T, H, HK, E, jnp.float32), segments()
    got = compiled("xla", 90, scoring, SINKS)(*numbers, ids)
    wanted = compiled_dense(scoring, SINKS)(*numbers, ids)
    for actual, exact in zip(got, wanted, strict=True):
        assert relative_error(actual, exact) < 1e-5
    plain = compiled_dense(scoring)(*numbers, ids)
    assert relative_error(plain[1], wanted[1]) > 1e-2, "sinks make no difference"


def test_a_diverged_sample_touches_no_other_beside_sinks():
    ids, spans = layout(PIECES, T)
    numbers = problem(T, H, HK, E, jnp.float32)
    run = compiled("xla", 90, Scoring(), SINKS)
    check_bad_row(numbers, ids, spans, run, "q k v dout", np.nan)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("softcap", [1e-2, 0.5, 20.0])
def test_scale_and_soft_cap_are_those_of_the_definition(softcap, window):
    """Caps far below the scores, of their size, and far above."""
    scoring = Scoring(window=window, scale=0.6, softcap=softcap)
    numbers, ids = problem(T, H, HK, E, jnp.float32), segments()
    got = compiled("xla", 90, scoring)(*numbers, ids)
    wanted = compiled_dense(scoring)(*numbers, ids)
    for actual, exact in zip(got, wanted, strict=True):
        assert relative_error(actual, exact) < 1e-5
    uncapped = compiled_dense(Scoring(window=window, scale=0.6))(*numbers, ids)
    assert relative_error(uncapped[1], wanted[1]) > 1e-3, "the cap makes no difference"


def test_a_soft_cap_is_as_accurate_in_bfloat16_as_plain_jax():
    scoring = Scoring(softcap=2.0)
    numbers, ids = problem(T, H, HK, E, jnp.bfloat16), segments()
    got = compiled("xla", 90, scoring)(*numbers, ids)
    wide = [x.astype(jnp.float32) for x in numbers]
    exact = compiled_dense(scoring)(*wide, ids)
    plain = compiled_dense(scoring)(*numbers, ids)
    for actual, baseline, wanted in zip(got, plain, exact, strict=True):
        baseline = baseline.astype(jnp.bfloat16)
        assert_as_accurate_as(
            actual=actual, baseline=baseline, exact=wanted, factor=4.0
        )


@pytest.mark.parametrize("bad", BAD)
def test_a_diverged_sample_touches_no_other_under_a_soft_cap(bad):
    ids, spans = layout(PIECES, T)
    numbers = problem(T, H, HK, E, jnp.float32)
    run = compiled("xla", 90, Scoring(softcap=2.0))
    check_bad_row(numbers, ids, spans, run, "q k v dout", bad)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("score_bytes", [1, 3 * 128 * 256 * H * 4])
def test_blocks_in_turn_are_blocks_together(window, score_bytes, monkeypatch):
    q, k, v = (jnp.concatenate([z] * 4) for z in inputs())
    ids = jnp.concatenate(
        [jnp.where(segments() < 0, -1, segments() + 9 * i) for i in range(4)]
    )
    dy = normal(5, q.shape)

    def run():
        attend = functools.partial(
            packed_attention,
            segment_ids=ids,
            lengths=SegmentLengths(90),
            scoring=Scoring(window=window),
        )
        return jax.jit(functools.partial(both_ways, attend))(q, k, v, dy)

    together = run()
    monkeypatch.setattr(banded_attention, "_MAX_SCORE_BYTES", score_bytes)
    for got, want in zip(run(), together, strict=True):
        assert relative_error(got, want) < 1e-6


def test_long_segments_keep_no_square_of_scores():
    """All scores at once would take 8 GiB, and their gradient as much again."""
    t, heads = 8192, 32
    q = jax.ShapeDtypeStruct((t, heads, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((t, 8, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((t,), jnp.int32)

    def loss(q, k, v, ids):
        out = packed_attention(q, k, v, ids, lengths=SegmentLengths(t))
        return out.astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    memory = gradient.lower(q, k, k, ids).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 2**30


def test_a_band_shorter_than_a_sample_would_be_wrong():
    """Negative control of `SegmentLengths.longest`."""
    q, k, v = (jnp.concatenate([z, z]) for z in inputs())
    ids = jnp.zeros(2 * T, jnp.int32)
    short, full = (
        jax.jit(functools.partial(packed_attention, lengths=SegmentLengths(n)))(
            q, k, v, ids
        )
        for n in (2, 2 * T)
    )
    assert relative_error(short, full) > 1e-2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("where", "bad"), WHERE_AND_BAD)
def test_a_diverged_sample_touches_no_other(where, bad, dtype):
    ids, spans = layout(PIECES, T)
    numbers = problem(T, H, HK, E, dtype)
    check_bad_row(numbers, ids, spans, compiled("xla", 90), where, bad)


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(jnp.float32, LARGEST), (jnp.bfloat16, LARGEST), (jnp.float16, 6e4)],
)
@pytest.mark.parametrize("where", WHERE)
def test_the_largest_values_touch_no_other(where, dtype, largest):
    ids, spans = layout(PIECES, T)
    numbers = problem(T, H, HK, E, dtype)
    run = compiled("xla", 90)
    got = check_isolation(numbers, ids, spans, run, where, largest)
    assert np.isfinite(np.asarray(got[0], np.float32)).all()


def test_a_gradient_that_overflows_is_not_hidden():
    """Zeros would look like a normal step of its own sample."""
    ids, spans = layout(PIECES, T)
    row = sick_row(spans)
    q, *others = problem(T, H, HK, E, jnp.float32)
    q = q.at[row].set(0)  # so that the row attends to others, too
    k, v, dout = (x.at[row].set(LARGEST) for x in others)
    _, dq, _, _ = compiled("xla", 90)(q, k, v, dout, ids)
    assert not np.isfinite(dq[row]).any()


def test_an_unknown_implementation_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as in a run
    q, k, v = inputs()
    message = "implementation='cuddn' is unknown; there is: xla, cudnn, triton"
    with pytest.raises(ValueError, match=message):
        packed_attention(
            q, k, v, segments(), lengths=SegmentLengths(90), implementation="cuddn"
        )

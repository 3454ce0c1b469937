"""Compares attention on a GPU, by each kernel, with its definition and with itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.modules.attention import compiler_options, packed_attention
from jaxlora.modules.cudnn_attention import cudnn_unsupported
from jaxlora.modules.length_classes import SegmentLengths
from jaxlora.modules.scoring import Scoring
from jaxlora.modules.triton_attention import triton_unsupported
from tests.jaxlora.modules.attention_cases import (
    BAD,
    MEAN,
    PIECES,
    PLAIN,
    SINKS,
    WHERE,
    both_ways,
    check_bad_row,
    compiled,
    compiled_dense,
    layout,
    problem,
)
from tests.oracle import assert_as_accurate_as

UNSUPPORTED = {
    name: why(dtype=jnp.bfloat16, head_dim=128)
    for name, why in (("cudnn", cudnn_unsupported), ("triton", triton_unsupported))
}
pytestmark = pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=str(why)))
        for name, why in UNSUPPORTED.items()
    ],
)

ROWS = 2048
RAGGED = [(513, 0), (1, 0), (37, 2), (600, 0), (128, 0), (129, 63), (256, 0), (3, 0)]
SHORT = [(1 + i % 7, i % 3 == 0) for i in range(60)]


def gpu_run(ids, implementation, *, longest=600, scoring=PLAIN, sinks=None):
    """Returns (q, k, v, dout) -> (out, dq, dk, dv)."""
    run = compiled(implementation, longest, scoring, sinks)
    return lambda *numbers: run(*numbers, ids)


def assert_same_bits(actual, wanted):
    """Compares in float32, which holds every value of the narrower types."""
    for got, want in zip(actual, wanted, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (got, want)))


@pytest.mark.parametrize("pieces", [RAGGED, SHORT], ids=["ragged", "short"])
@pytest.mark.parametrize("scoring", [PLAIN, Scoring(window=100, scale=0.05)])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "e", "dtype"),
    [
        (8, 2, 128, jnp.bfloat16),
        (4, 4, 64, jnp.bfloat16),
        (6, 2, 64, jnp.float16),
        (8, 4, 256, jnp.bfloat16),
    ],
)
def test_matches_the_definition(
    pieces, scoring, has_sinks, heads, kv_heads, e, dtype, kernels
):
    sinks = tuple(np.resize(SINKS, heads).tolist()) if has_sinks else None
    ids, _ = layout(pieces, ROWS)
    numbers = problem(ROWS, heads, kv_heads, e, dtype)
    given = {"scoring": scoring, "sinks": sinks}
    got = gpu_run(ids, kernels, **given)(*numbers)
    plain = gpu_run(ids, "xla", **given)(*numbers)
    full = [x.astype(jnp.float32) for x in numbers]
    exact = compiled_dense(scoring, sinks)(*full, ids)
    is_padding = np.asarray(ids) < 0
    for actual, baseline, wanted in zip(got, plain, exact, strict=True):
        assert_as_accurate_as(actual=actual, baseline=baseline, exact=wanted)
        assert not np.asarray(actual, np.float32)[is_padding].any()


@pytest.mark.parametrize(
    "pieces", [[(2048, 0)], RAGGED, SHORT], ids=["one", "ragged", "short"]
)
@pytest.mark.parametrize(("heads", "kv_heads", "e"), [(32, 8, 128), (8, 4, 256)])
def test_gives_the_same_bits_each_time(pieces, heads, kv_heads, e, kernels):
    ids, _ = layout(pieces, ROWS)
    numbers = problem(ROWS, heads, kv_heads, e, jnp.bfloat16)
    run = gpu_run(ids, kernels, longest=2048)
    first = run(*numbers)
    for _ in range(5):
        assert_same_bits(run(*numbers), first)


def test_several_layers_in_one_program_give_the_bits_of_one_layer_each(kernels):
    ids, _ = layout(RAGGED, ROWS)
    layers = [problem(ROWS, 8, 2, 128, jnp.bfloat16, seed) for seed in range(3)]
    attend = functools.partial(
        packed_attention,
        segment_ids=ids,
        lengths=SegmentLengths(600, MEAN),
        implementation=kernels,
    )

    @functools.partial(jax.jit, compiler_options=compiler_options(kernels))
    def all_layers(layers):
        return [both_ways(attend, *numbers) for numbers in layers]

    for got, numbers in zip(all_layers(layers), layers, strict=True):
        assert_same_bits(got, gpu_run(ids, kernels)(*numbers))


@pytest.mark.parametrize("tokens", [5, 100, 257, 600])
def test_the_place_in_a_row_and_the_neighbours_change_no_bit(tokens, kernels):
    sample = problem(tokens, 8, 2, 128, jnp.bfloat16, seed=99)

    def rows_of_sample(pieces, number, seed):
        ids, spans = layout(pieces, ROWS)
        start, end = spans[number]
        others = problem(ROWS, 8, 2, 128, jnp.bfloat16, seed)
        numbers = [x.at[start:end].set(y) for x, y in zip(others, sample, strict=True)]
        return [x[start:end] for x in gpu_run(ids, kernels)(*numbers)]

    alone = rows_of_sample([(tokens, 0)], 0, seed=1)
    beside_long = rows_of_sample([(331, 0), (tokens, 0), (500, 0)], 1, seed=2)
    assert_same_bits(beside_long, alone)
    pieces = [(64, 0), (1, 0), (600, 63), (tokens, 0), *SHORT[:30]]
    assert_same_bits(rows_of_sample(pieces, 3, seed=3), alone)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", WHERE)
def test_a_diverged_sample_touches_no_other(where, bad, kernels):
    ids, spans = layout(PIECES, ROWS)
    numbers = problem(ROWS, 8, 2, 128, jnp.bfloat16)
    run = lambda *args: gpu_run(args[-1], kernels)(*args[:-1])
    check_bad_row(numbers, ids, spans, run, where, bad)

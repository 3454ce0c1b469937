"""Attention through Triton: its kernels in Triton's interpreter, and where they run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.modules import triton_attention
from jaxlora.modules.attention import packed_attention
from jaxlora.modules.length_classes import SegmentLengths
from jaxlora.modules.scoring import PLAIN, Scoring
from jaxlora.modules.triton_attention import (
    Tiles,
    padded_dim,
    tiles_of,
    triton_unsupported,
)
from jaxlora.pallas_kernels.triton.attention_backward import (
    attention_key_gradient,
    attention_query_gradient,
)
from jaxlora.pallas_kernels.triton.attention_forward import attention_forward
from jaxlora.pallas_kernels.triton.launch import Tile
from jaxlora.pallas_kernels.triton.target import forced_capability, interpreted
from tests.jaxlora.modules.attention_cases import (
    SINKS,
    both_ways,
    check_bad_row,
    check_isolation,
    compiled,
    compiled_dense,
    layout,
    problem,
)
from tests.oracle import assert_as_accurate_as
from tests.pallas_kernels import triton_interpreter
from tests.pallas_kernels.triton_facts import kernel_facts, shared_memory_bytes

ROWS, LONGEST = 128, 60
# A segment of several tiles, one of a tile and a row, a single row, and padding.
RAGGED = [(60, 0), (17, 5), (1, 0), (30, 0)]


def _tile(queries, keys):
    sizes = {"QUERIES": queries, "KEYS": keys}
    return Tile(sizes=sizes, num_warps=4, num_stages=1)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles in few rows, in Triton's interpreter."""
    tiles = Tiles(_tile(32, 16), _tile(16, 16), _tile(16, 32))
    monkeypatch.setattr(triton_attention, "TILES", {256: tiles})
    monkeypatch.setattr(triton_attention, "TILES_80", {})
    with interpreted(triton_interpreter.run):
        yield


@pytest.mark.parametrize(
    ("scoring", "heads", "kv_heads", "e", "sinks"),
    [
        (PLAIN, 2, 1, 32, None),
        (Scoring(window=20, scale=0.3), 2, 2, 24, None),
        (Scoring(window=3), 1, 1, 16, None),
        (Scoring(window=40, softcap=2.0), 2, 1, 16, None),
        (Scoring(window=20), 2, 1, 16, SINKS[1:3]),
    ],
)
def test_matches_the_definition(scoring, heads, kv_heads, e, sinks, small_tiles):
    ids, _ = layout(RAGGED, ROWS)
    numbers = problem(ROWS, heads, kv_heads, e, jnp.float16, seed=4)
    got = compiled("triton", LONGEST, scoring, sinks)(*numbers, ids)
    plain = compiled("xla", LONGEST, scoring, sinks)(*numbers, ids)
    wide = [x.astype(jnp.float32) for x in numbers]
    exact = compiled_dense(scoring, sinks)(*wide, ids)
    for actual, baseline, wanted in zip(got, plain, exact, strict=True):
        # The gradient of the scores is rounded, too. Plain JAX keeps it in float32.
        assert_as_accurate_as(
            actual=actual, baseline=baseline, exact=wanted, factor=3.0
        )
        assert not np.asarray(actual)[np.asarray(ids) < 0].any()


@pytest.mark.parametrize("bad", [None, np.nan])
def test_wide_heads(bad, small_tiles, monkeypatch):
    """Their products are added up over parts of the features."""
    for tile in triton_attention.TILES[256]:
        monkeypatch.setitem(tile.sizes, "PART", 16)
    scoring = Scoring(window=40, scale=1 / 16)
    numbers = problem(ROWS, 2, 1, 64, jnp.float16, seed=4)
    if bad is not None:
        ids, spans = layout([(10, 0), (3, 0), (40, 6), (30, 0)], ROWS)
        run = compiled("triton", LONGEST, scoring)
        check_bad_row(numbers, ids, spans, run, "q k v dout", bad)
        return
    ids, _ = layout(RAGGED, ROWS)
    got = compiled("triton", LONGEST, scoring)(*numbers, ids)
    plain = compiled("xla", LONGEST, scoring)(*numbers, ids)
    exact = compiled_dense(scoring)(*(x.astype(jnp.float32) for x in numbers), ids)
    for triple in zip(got, plain, exact, strict=True):
        names = zip(("actual", "baseline", "exact"), triple, strict=True)
        assert_as_accurate_as(**dict(names), factor=3.0)


@pytest.mark.parametrize(("where", "bad"), [("q k v dout", np.nan), ("k", np.inf)])
def test_a_diverged_sample_touches_no_other(where, bad, small_tiles):
    ids, spans = layout([(10, 0), (3, 0), (40, 6), (30, 0)], ROWS)
    numbers = problem(ROWS, 2, 1, 16, jnp.float16)
    check_bad_row(numbers, ids, spans, compiled("triton", LONGEST), where, bad)


def test_the_largest_values_touch_no_other(small_tiles):
    ids, spans = layout([(10, 0), (3, 0), (40, 6), (30, 0)], ROWS)
    numbers = problem(ROWS, 2, 1, 16, jnp.float16)
    run = compiled("triton", LONGEST)
    got = check_isolation(numbers, ids, spans, run, "q k v", 6e4)
    assert np.isfinite(np.asarray(got[0], np.float32)).all()


def test_the_place_in_a_row_and_the_neighbours_change_no_bit(small_tiles):
    """Twice the same place, then another one beside other samples."""
    sample = problem(37, 2, 1, 16, jnp.float16, seed=99)

    def rows_of_sample(pieces, number, seed):
        ids, spans = layout(pieces, ROWS)
        start, end = spans[number]
        others = problem(ROWS, 2, 1, 16, jnp.float16, seed)
        numbers = [x.at[start:end].set(y) for x, y in zip(others, sample, strict=True)]
        got = compiled("triton", LONGEST)(*numbers, ids)
        return [np.asarray(x[start:end]) for x in got]

    alone = rows_of_sample([(37, 0)], 0, seed=1)
    for got in (
        rows_of_sample([(37, 0)], 0, seed=1),
        rows_of_sample([(13, 2), (37, 0), (60, 0)], 1, seed=2),
    ):
        for actual, wanted in zip(got, alone, strict=True):
            np.testing.assert_array_equal(actual, wanted)


def test_recomputing_it_changes_no_bit(small_tiles):
    ids, _ = layout(RAGGED, ROWS)
    numbers = problem(ROWS, 2, 1, 16, jnp.float16)
    attend = functools.partial(
        packed_attention,
        segment_ids=ids,
        lengths=SegmentLengths(LONGEST),
        implementation="triton",
    )
    kept, recomputed = (
        jax.jit(functools.partial(both_ways, run))(*numbers)
        for run in (attend, jax.checkpoint(attend))
    )
    for actual, wanted in zip(recomputed, kept, strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_it_keeps_its_operands_and_one_number_for_a_row_and_head():
    rows, heads, kv_heads, e = 4096, 32, 8, 128
    shape = lambda n: jax.ShapeDtypeStruct((rows, n, e), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def forward(q, k, v, ids):
        attend = functools.partial(
            packed_attention,
            segment_ids=ids,
            lengths=SegmentLengths(1024),
            implementation="triton",
        )
        return jax.vjp(attend, q, k, v)[1]

    with interpreted(triton_interpreter.run):  # it only traces
        kept = jax.eval_shape(
            forward, shape(heads), shape(kv_heads), shape(kv_heads), ids
        )
    found = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
    wanted = rows * (2 * (2 * heads + 2 * kv_heads) * e + 4 * heads)
    assert wanted <= found < 1.01 * wanted


def test_wrong_lengths_change_nothing(small_tiles):
    """They only choose the number of programs."""
    ids, _ = layout([(1, 0)] * 40 + [(60, 0)], ROWS)
    q, k, v, _ = problem(ROWS, 2, 1, 16, jnp.float16)

    def attend(lengths):
        return packed_attention(q, k, v, ids, lengths=lengths, implementation="triton")

    one, other = (attend(SegmentLengths(*x)) for x in ((60, 1), (1, 10_000)))
    np.testing.assert_array_equal(one, other)
    assert np.isfinite(np.asarray(one)).all()


def test_too_many_elements_are_refused(small_tiles):
    q = jax.ShapeDtypeStruct((2**18, 64, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2**18,), jnp.int32)
    attend = functools.partial(
        packed_attention, lengths=SegmentLengths(1024), implementation="triton"
    )
    with pytest.raises(ValueError, match="offsets are 32 bits wide"):
        jax.eval_shape(attend, q, q, q, ids)


# ---- compiled, without a GPU ---------------------------------------------------------

X, F32, I32 = "*bf16", "*fp32", "*i32"
PLACES = [I32] * 5
KERNELS = {
    "forward": (attention_forward, [X, X, X, *PLACES, I32, X, F32]),
    "queries": (attention_query_gradient, [X] * 5 + [F32, *PLACES, I32, X, F32]),
    "keys": (attention_key_gradient, [X] * 4 + [F32, F32, *PLACES, X, X]),
}


BOUNDED = {"WINDOW": 1000, "CAP": 50.0}
# Each kernel is always compiled once, with a padded head, window and cap or with the
# largest head; the rest is of the grid.
ALWAYS = {("forward", 96, 80), ("queries", 256, 80), ("keys", 96, 120)}
TILES = [
    pytest.param(
        *(capability, head_dim, options, name),
        marks=() if (name, head_dim, capability) in ALWAYS else pytest.mark.grid,
    )
    for capability in (80, 89, 120)
    for head_dim, options in (
        *((64, BOUNDED), (96, BOUNDED)),
        *((128, {}), (256, {}), (512, {})),
    )
    for name in KERNELS
]


@pytest.mark.parametrize(("capability", "head_dim", "options", "name"), TILES)
def test_a_tile_fits_and_does_not_spill(
    capability, head_dim, options, name, monkeypatch
):
    # Compiled kernels are kept where the tests' programs are kept.
    folder = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("TRITON_CACHE_DIR", f"{folder}/triton")
    kernel, pointers = KERNELS[name]
    tile = getattr(tiles_of(head_dim, capability), name)
    shape = {"T": 8192, "H": 32, "HK": 8, "E": head_dim, "EP": padded_dim(head_dim)}
    shape["PART"] = shape["EP"]
    constants = shape | {"WINDOW": 0, "SCALE": 0.1, "CAP": 0.0} | options
    facts = kernel_facts(
        kernel,
        pointers,
        constants | tile.sizes,
        capability=capability,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    assert facts.local_bytes == 0, facts
    assert facts.shared_bytes <= shared_memory_bytes(capability), facts


# ---- where it can run ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [
        (jnp.bfloat16, 128, None),
        (jnp.float16, 256, None),
        (jnp.bfloat16, 96, None),
        (jnp.float32, 128, "dtype float32 is neither bfloat16 nor float16"),
        (jnp.bfloat16, 512, None),
        (jnp.bfloat16, 100, "head_dim 100 is neither a multiple of 8 up to 256 nor 5"),
        (jnp.bfloat16, 264, "head_dim 264 is neither a multiple of 8 up to 256 nor 5"),
    ],
)
def test_what_it_can_run(dtype, head_dim, reason):
    with forced_capability(89, num_sms=142):
        found = triton_unsupported(dtype=dtype, head_dim=head_dim)
    assert found is None if reason is None else found.startswith(reason)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_it_cannot_run():
    reason = triton_unsupported(dtype=jnp.bfloat16, head_dim=128)
    assert reason == "the device is a cpu, not an NVIDIA GPU"

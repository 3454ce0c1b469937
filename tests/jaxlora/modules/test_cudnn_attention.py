"""Attention through cuDNN: the calls it gets, and the use of its results.

`cudnn_stand_in` takes the place of cuDNN.
"""

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn

from jaxlora.modules import cudnn_attention
from jaxlora.modules.attention import packed_attention
from jaxlora.modules.cudnn_attention import cudnn_unsupported
from jaxlora.modules.cudnn_call import class_backward, class_forward
from jaxlora.modules.length_classes import (
    LengthClass,
    SegmentLengths,
    length_classes,
    members_of,
    shortest_class,
)
from jaxlora.modules.scoring import Scoring
from tests.jaxlora.modules import cudnn_stand_in
from tests.jaxlora.modules.attention_cases import (
    LARGEST,
    MEAN,
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
)

rows_of = st.lists(  # (tokens, padding behind them)
    st.tuples(st.integers(1, 90), st.just(0) | st.integers(0, 20)), max_size=40
)


# ---- the calls of cuDNN --------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 70).map(lambda n: 64 * n) | st.integers(1, 3000),
    longest=st.integers(1, 10_000),
    mean=st.integers(1, 3000),
)
def test_the_classes_hold_every_length(rows, longest, mean):
    classes = length_classes(rows, longest, mean)
    assert classes[0].above == 0 and classes[-1].tokens >= min(longest, rows)
    for short, long in itertools.pairwise(classes):
        assert short.tokens == long.above < long.tokens
    for c in classes:
        assert rows % c.tokens == 0
        assert c.segments % (rows // c.tokens) == 0
        assert c.segments // (rows // c.tokens) > 1, "cuDNN would ignore the offsets"
        # Only the shortest class can overflow.
        assert c.above == 0 or rows // (c.above + 1) <= c.segments
        assert c.above == 0 or c.segments * c.tokens <= 2 * rows
    assert shortest_class(rows, longest, mean).segments * mean >= 1.5 * rows


def test_the_classes_of_common_sizes():
    def of(rows, longest, mean):
        return [(c.tokens, c.segments) for c in length_classes(rows, longest, mean)]

    assert of(8192, 2048, 2000) == [(2048, 8)]
    assert of(8192, 2048, 480) == [(1024, 32), (2048, 8)]
    assert of(8192, 2048, 64) == [(256, 192), (512, 32), (1024, 16), (2048, 8)]
    assert of(4096, 1024, 600) == [(1024, 12)]
    assert of(4096, 10, 10) == [(128, 640)]


@settings(max_examples=50, deadline=None)
@given(pieces=rows_of)
def test_each_segment_is_in_the_class_of_its_length(pieces):
    rows = 640
    ids, spans = layout(pieces, rows)
    classes = length_classes(rows, 90, MEAN)
    wide = tuple(  # one more class, and room for every segment in the shortest
        LengthClass(above=a, tokens=b, segments=640)
        for a, b in ((0, 20), (20, classes[-1].tokens))
    )
    got = jax.jit(members_of, static_argnums=1)(ids, wide)
    for c, members in zip(wide, got, strict=True):
        wanted = [(a, b) for a, b in spans if c.above < b - a <= c.tokens]
        assert not members.overflows.any()
        starts = [a for a, _ in wanted] + [rows] * (c.segments - len(wanted))
        lengths = [b - a for a, b in wanted] + [0] * (c.segments - len(wanted))
        np.testing.assert_array_equal(members.starts, starts)
        np.testing.assert_array_equal(members.lengths, lengths)
        is_member = np.zeros(rows, bool)
        for n, (a, b) in enumerate(wanted):
            is_member[a:b] = True
            np.testing.assert_array_equal(members.index[a:b], n)
            np.testing.assert_array_equal(members.offset[a:b], np.arange(b - a))
        np.testing.assert_array_equal(members.is_member, is_member)


@pytest.mark.parametrize("window", [None, 100])
def test_cudnn_is_called_as_jax_calls_it(window, monkeypatch):
    monkeypatch.setattr(jax_cudnn, "check_is_flash_attention", lambda *_, **__: None)
    rows, heads, kv_heads, e = 512, 4, 2, 64
    c = length_classes(rows, 200, MEAN)[-1]
    count, per_row = rows // c.tokens, c.segments * c.tokens // rows
    q, k, v, dout = problem(rows, heads, kv_heads, e, jnp.bfloat16)
    ids, _ = layout([(200, 0)], rows)

    def ours(q, k, v, dout):
        members = members_of(ids, (c,))[0]
        scoring = Scoring(window=window)
        out, lse = class_forward(q, k, v, c, members, scoring)
        return class_backward((q, k, v, out, lse), dout, c, members, scoring)

    def theirs(q, k, v, dout):
        q, k, v, dout = (x.reshape(count, c.tokens, -1, e) for x in (q, k, v, dout))
        none = jnp.zeros(0, q.dtype)
        lengths = jnp.zeros((count, per_row), jnp.int32)
        offsets = jnp.zeros((count, per_row + 1), jnp.int32)
        segments = (lengths, lengths, offsets, offsets)
        config = {
            "scale": e**-0.5,
            "seed": 42,
            "dropout_rate": 0.0,
            "variadic_args": (False, False),
            "mask_type": jax_cudnn.MaskType.PADDING_CAUSAL,
            "layout": jax_cudnn.AttentionLayout.BTNH.value,
            "sliding_window_length": window,
        }
        args = (q, k, v, none, *segments, none, none)
        out, stats = jax_cudnn._dot_product_attention_fwd_p.bind(
            *args, **config, is_training=True
        )
        return jax_cudnn._dot_product_attention_bwd_p.bind(
            *args, stats, out, dout, **config
        )

    asked, wanted = (_custom_calls(f, q, k, v, dout) for f in (ours, theirs))
    assert len(asked) == len(wanted) == 2
    for i, (attributes, *_) in enumerate(asked):
        # JAX leaves this one to XLA.
        attention = attributes["backend_config"]["cudnn_fmha_backend_config"]
        assert attention.pop("force_deterministic") == (i == 1)
    assert asked == wanted


def _custom_calls(f, *args):
    """Returns the calls of cuDNN in a program that is lowered for CUDA."""
    lowered = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))
    found = []

    def visit(op):
        op = op.operation
        if op.name == "stablehlo.custom_call":
            attributes = {name: str(op.attributes[name]) for name in op.attributes}
            if "cudnn" in attributes["call_target_name"]:
                config = op.attributes["backend_config"].value
                attributes["backend_config"] = json.loads(config)
                # The segments come last; only their order in memory matters.
                operands = [str(x.type) for x in op.operands][:-4]
                del attributes["operand_layouts"]  # row-major
                assert attributes.pop("output_operand_aliases", "[]") == "[]"
                results = [str(x.type) for x in op.results]
                found.append((attributes, operands, results))
        for region in op.regions:
            for block in region.blocks:
                for inner in block.operations:
                    visit(inner)

    visit(lowered.compiler_ir("stablehlo").operation)
    return found


# ---- the use of its results ----------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(jax.ffi, "ffi_call", cudnn_stand_in.ffi_call)
    # Several classes in few rows.
    monkeypatch.setattr("jaxlora.modules.length_classes.SHORTEST_CLASS", 6)


ROWS, LONGEST = 384, 90


@pytest.mark.parametrize(
    ("scoring", "sinks"),
    [
        pytest.param(Scoring(), None, marks=pytest.mark.grid),
        (Scoring(window=20, scale=0.7), None),
        (Scoring(window=20, scale=0.7), SINKS),
    ],
)
def test_any_row_is_attended_as_defined(scoring, sinks, stand_in):
    classes = length_classes(ROWS, LONGEST, MEAN)
    assert [c.tokens for c in classes] == [24, 48, 96]
    numbers = problem(ROWS, 4, 2, 8, jnp.float32)
    # A float32 near a sink of 40, such as the logarithm of the sum, errs by 2e-6.
    error = 1e-5 if sinks is None else 2e-5

    @settings(max_examples=15, deadline=None)
    @given(pieces=rows_of)
    def check(pieces):
        ids, _ = layout(pieces, ROWS)
        got = compiled("cudnn", LONGEST, scoring, sinks)(*numbers, ids)
        wanted = compiled_dense(scoring, sinks)(*numbers, ids)
        for actual, exact in zip(got, wanted, strict=True):
            np.testing.assert_allclose(actual, exact, rtol=0, atol=error)
            np.testing.assert_array_equal(np.asarray(actual)[ids < 0], 0)

    check()


def test_segments_without_room_are_nan(stand_in, monkeypatch):
    mean = 16
    most = shortest_class(ROWS, LONGEST, mean).segments
    ids, spans = layout([(1, 0)] * 100 + [(2, 1)] * 50 + [(90, 0)], ROWS)
    assert len(spans) > most + 1
    numbers = problem(ROWS, 4, 2, 8, jnp.float32)
    attend = jax.jit(
        functools.partial(
            packed_attention,
            segment_ids=ids,
            lengths=SegmentLengths(LONGEST, mean),
            implementation="cudnn",
        )
    )
    lost = np.zeros(ROWS, bool)
    for start, end in spans[most:-1]:
        lost[start:end] = True
    wanted = compiled_dense()(*numbers, ids)
    for actual, exact in zip(both_ways(attend, *numbers), wanted, strict=True):
        np.testing.assert_allclose(actual[~lost], exact[~lost], rtol=0, atol=1e-5)
    assert np.isnan(attend(*numbers[:3])[lost]).all()


@pytest.mark.parametrize(("where", "bad"), WHERE_AND_BAD)
def test_a_diverged_sample_touches_no_other(where, bad, stand_in):
    ids, spans = layout(PIECES, ROWS)
    numbers = problem(ROWS, 4, 2, 8, jnp.float32)
    check_bad_row(numbers, ids, spans, compiled("cudnn", LONGEST), where, bad)


@pytest.mark.parametrize("where", WHERE)
def test_the_largest_values_touch_no_other(where, stand_in):
    ids, spans = layout(PIECES, ROWS)
    numbers = problem(ROWS, 4, 2, 8, jnp.float32)
    run = compiled("cudnn", LONGEST)
    got = check_isolation(numbers, ids, spans, run, where, LARGEST)
    assert np.isfinite(got[0]).all()


def test_too_many_elements_are_refused():
    q = jax.ShapeDtypeStruct((2**18, 64, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2**18,), jnp.int32)
    attend = functools.partial(
        packed_attention, lengths=SegmentLengths(1024), implementation="cudnn"
    )
    with pytest.raises(ValueError, match="offsets are 32 bits wide"):
        jax.eval_shape(attend, q, q, q, ids)


# ---- where it can run ----------------------------------------------------------------


class _Device:
    def __init__(self, capability):
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("capability", "version", "dtype", "head_dim", "reason"),
    [
        ("9.0", 91002, jnp.bfloat16, 128, None),
        ("9.0", 92000, jnp.float16, 256, None),
        ("10.0", 92000, jnp.bfloat16, 64, None),
        ("10.3", 91100, jnp.bfloat16, 128, None),
        ("10.3", 91099, jnp.bfloat16, 128, "10.3 takes cuDNN 9.11 or newer"),
        ("10.0", 92000, jnp.bfloat16, 256, "head_dim 256 is not .* up to 128"),
        ("8.9", 92000, jnp.bfloat16, 128, "compute capability is 8.9"),
        ("12.0", 92000, jnp.bfloat16, 128, "compute capability is 12.0"),
        ("9.0", 91001, jnp.bfloat16, 128, "cuDNN 9.10.2 or newer is not loaded"),
        ("9.0", None, jnp.bfloat16, 128, "cuDNN 9.10.2 or newer is not loaded"),
        ("9.0", 92000, jnp.float32, 128, "dtype float32 is neither"),
        ("9.0", 92000, jnp.bfloat16, 100, "head_dim 100 is not a multiple of 8"),
    ],
)
def test_where_cudnn_can_run(capability, version, dtype, head_dim, reason, monkeypatch):
    class Versions:
        @staticmethod
        def cudnn_get_version():
            return version

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [_Device(capability)])
    versions = None if version is None else Versions
    monkeypatch.setattr(cudnn_attention, "cuda_versions", versions)
    got = cudnn_unsupported(dtype=dtype, head_dim=head_dim)
    if reason is None:
        assert got is None
        capped = cudnn_unsupported(dtype=dtype, head_dim=head_dim, softcap=50.0)
        assert capped == "the model caps attention scores at 50, which cuDNN cannot do"
    else:
        assert re.search(reason, got)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_it_cannot_run():
    reason = cudnn_unsupported(dtype=jnp.bfloat16, head_dim=128)
    assert reason == "the device is a cpu, not an NVIDIA GPU"

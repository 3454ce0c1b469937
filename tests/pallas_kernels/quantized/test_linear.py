"""Linears with adapters on quantized weights agree with their definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlora.pallas_kernels import (
    LinearShape,
    Projection,
    frozen_linear,
    multi_lora_linear,
    multi_lora_linears,
)
from jaxlora.pallas_kernels.triton import target as triton
from tests.oracle import assert_as_accurate_as, relative_error
from tests.pallas_kernels.problems import (
    AS_FOR_USERS,
    QUICK_TO_COMPILE,
    compiled_both_ways,
)
from tests.pallas_kernels.quantized.problems import (
    KINDS,
    padding_rows,
    projections_of,
    quantized_problem,
    ragged_problem,
)
from tests.pallas_kernels.quantized.weights import dequantized
from tests.pallas_kernels.reference import (
    multi_lora_linear_reference,
    multi_lora_linears_reference,
)

RESULTS = ("y", "dx", "da", "db")


@pytest.mark.parametrize(
    ("kind", "mask"),
    list(zip(KINDS, ["dropout", None, "given", "dropout", None], strict=True)),
)
def test_bfloat16_matches_the_definition(kind, mask):
    p = quantized_problem(kind, mask=mask, seed=5)
    exact = compiled_both_ways(multi_lora_linear_reference, p)
    low = p | {n: p[n].astype(jnp.bfloat16).astype(jnp.float32) for n in "ab"}
    plain = compiled_both_ways(multi_lora_linear_reference, low)
    actual = compiled_both_ways(multi_lora_linear, p)
    for name, got, base, want in zip(RESULTS, actual, plain, exact, strict=True):
        dtype = jnp.bfloat16 if name in ("y", "dx") else jnp.float32
        assert got.dtype == dtype
        base = base.astype(jnp.bfloat16).astype(dtype)
        assert_as_accurate_as(actual=got, baseline=base, exact=want)


@pytest.mark.parametrize(("kind", "seed"), [("fp8", 0), ("fp8", 1), ("nf4", 2)])
def test_ragged_mixes_match_the_definition(kind, seed):
    """Row by row, as rows differ in magnitude; padding rows hold NaN."""
    p = ragged_problem(kind, seed)
    actual = compiled_both_ways(multi_lora_linear, p)
    exact = compiled_both_ways(multi_lora_linear_reference, p)
    for name, got, want in zip(RESULTS, actual, exact, strict=True):
        assert jnp.isfinite(got).all(), name
        for mine, theirs in zip(got, want, strict=True):
            assert relative_error(mine, theirs) < 1e-5, name
    assert not actual[0][padding_rows(p)].any() and not actual[1][padding_rows(p)].any()


def run_together(op, p, fields):
    """Returns y and the gradients of x, A and B of several projections."""

    a, b = [f["a"] for f in fields], [f["b"] for f in fields]

    @functools.partial(jax.jit, compiler_options=QUICK_TO_COMPILE)
    def both(x, a, b):
        y, vjp = jax.vjp(op, x, a, b)
        dy = [jax.random.normal(jax.random.key(8), one.shape) for one in y]
        return jax.tree.leaves((y, vjp(dy)))

    return both(p["x"], a, b)


def test_several_projections_match_the_definition():
    """They differ in magnitude, and dy of all of them has one scale per row."""
    p = quantized_problem("fp8", dtype=jnp.float32, blocks=(2, -1, 0))
    fields = projections_of(p, "fp8")

    def together(x, a, b):
        projections = [
            Projection(**f | {"a": a_p, "b": b_p})
            for f, a_p, b_p in zip(fields, a, b, strict=True)
        ]
        return list(multi_lora_linears(x, projections, p["block_adapter"]))

    def reference(x, a, b):
        lists = [[f[k] for f in fields] for k in ("w", "scaling", "dropout")]
        w, scaling, dropout = lists
        bias = [None] * len(fields)
        blocks = p["block_adapter"]
        return multi_lora_linears_reference(x, w, a, b, scaling, blocks, bias, dropout)

    actual, wanted = (run_together(op, p, fields) for op in (together, reference))
    for got, want in zip(actual, wanted, strict=True):
        assert relative_error(got, want) < 1e-5


def numpy_e4m3(x, largest):
    """Rounds to e4m3 with one scale per row; `largest` becomes 448."""
    scale = np.maximum(largest * np.float32(1 / 448), np.float32(2.0**-126))
    rounded = np.clip(x * (1 / scale), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return rounded.astype(np.float64) * scale


def numpy_largest(x):
    return np.abs(x).max(axis=1, keepdims=True)


@pytest.mark.parametrize("kind", ["fp8", "fp8-forward", "nf4"])
def test_a_frozen_linear_is_the_formula_in_numpy(kind):
    p = quantized_problem(kind, dtype=jnp.float32)
    x, w, bias, blocks = (p[k] for k in ("x", "w", "bias", "block_adapter"))
    padding = padding_rows(p)
    x = jnp.where(padding[:, None], jnp.nan, x)
    dy = jax.random.normal(jax.random.key(2), (len(x), 72))

    @jax.jit
    def both(x, dy):
        y, vjp = jax.vjp(lambda x: frozen_linear(x, w, bias, blocks), x)
        return y, *vjp(dy)

    y, dx = both(x, jnp.where(padding[:, None], jnp.nan, dy))
    dense = np.asarray(dequantized(w), np.float64)
    x_used, dy_used = np.asarray(x)[~padding], np.asarray(dy)[~padding]
    x_used = numpy_e4m3(x_used, numpy_largest(x_used)) if "fp8" in kind else x_used
    dx_wanted = dy_used @ dense
    if kind == "fp8":
        scaled = dy_used * np.asarray(w.scale)
        rounded = numpy_e4m3(scaled, numpy_largest(scaled))
        dx_wanted = rounded @ np.asarray(w.values, np.float64)
    y_wanted = x_used @ dense.T + np.asarray(bias, np.float64)
    assert relative_error(y[~padding], y_wanted) < 1e-6
    assert relative_error(dx[~padding], dx_wanted) < 1e-6
    assert not y[padding].any() and not dx[padding].any()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_no_bit_depends_on_other_adapters(kind):
    """Rows, A, B and dy of adapter 0 change, which padding rows compute with."""
    p = quantized_problem(kind, mask="dropout")
    own = np.repeat(np.asarray(p["block_adapter"]) == 0, 16)[:, None]

    @jax.jit
    def run(x, a, b, dy):
        op = lambda x, a, b: multi_lora_linear(**p | {"x": x, "a": a, "b": b})
        y, vjp = jax.vjp(op, x, a, b)
        return y, *vjp(dy)

    dy = jax.random.normal(jax.random.key(4), (len(own), 72), jnp.bfloat16)
    clean = run(p["x"], p["a"], p["b"], dy)
    for bad in (1e4, np.nan, np.inf):
        sick = run(
            jnp.where(own, jnp.bfloat16(bad), p["x"]),
            p["a"].at[0].multiply(bad),
            p["b"].at[0].multiply(bad),
            jnp.where(own, jnp.bfloat16(bad), dy),
        )
        for name, got, want in zip(RESULTS, sick, clean, strict=True):
            others = ~own[:, 0] if name in ("y", "dx") else np.arange(4) != 0
            np.testing.assert_array_equal(got[others], want[others])


@pytest.mark.parametrize("kind", ["fp8-transposed", "nf4"])
def test_every_field_of_the_weight_is_frozen(kind):
    p = quantized_problem(kind, mask=None)

    def total(w):
        return multi_lora_linear(**p | {"w": w}).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(total, allow_int=True))(p["w"])
    for name, value in gradient.arrays.items():
        if value.dtype != jax.dtypes.float0:
            assert not np.asarray(value, np.float32).any(), name


def peak_bytes(kind, num_layers, n):
    """Returns the bytes that the gradient of a chain of linears allocates."""
    p = quantized_problem(kind, mask=None, k=64, n=64, blocks=(0,), ranks=(1,))

    def total(x, a, b, weights):
        for w in weights:
            fields = {"w": w, "a": a, "b": b, "bias": None}
            x = multi_lora_linear(**p | {"x": x} | fields)
        return x.astype(jnp.float32).sum()

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    stored = type(p["w"]).shapes(n, n)
    weight = dataclasses.replace(p["w"], **stored)
    tables = array(1, n, 1), array(1, 1, n)
    x = array(len(p["x"]), n, dtype=jnp.bfloat16)
    lowered = jax.jit(jax.grad(total, (0, 1, 2))).lower(
        x, *tables, [weight] * num_layers
    )
    return lowered.compile(AS_FOR_USERS).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "kind", ["fp8", pytest.param("int8", marks=pytest.mark.grid), "nf4"]
)
def test_dequantized_weights_are_not_kept(kind):
    """Also those of XLA on CPUs, which converts a product's operands to float32."""
    copies = peak_bytes(kind, num_layers=6, n=512) / (512 * 512 * 2)
    assert 1 < copies < 4.5, f"{copies:.2f} copies in bfloat16"


INVALID = [
    ({"layer": 0}, "layer was given with a quantized weight.*each layer's own"),
    ({"w_transposed": True}, "w_transposed=True was given with a quantized weight"),
    ({"x": jnp.zeros((64, 129))}, r"shapes do not match: x \(64, 129\), w \(128, 72\)"),
    ({"x": jnp.zeros((64, 128), jnp.int32)}, "x is int32, .* Cast x"),
]


@pytest.mark.parametrize(("change", "message"), INVALID)
def test_invalid_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        multi_lora_linear(**quantized_problem("int8") | change)


def test_weights_whose_arrays_do_not_match_are_refused():
    p = quantized_problem("fp8")
    w = dataclasses.replace(p["w"], scale=p["w"].scale[:5])
    with pytest.raises(ValueError, match="arrays of Fp8Weight do not match"):
        multi_lora_linear(**p | {"w": w})


def test_projections_of_different_formats_are_refused():
    p = quantized_problem("fp8")
    x, blocks = p.pop("x"), p.pop("block_adapter")
    one = Projection(**p)
    int8 = Projection(**p | {"w": quantized_problem("int8")["w"]})
    with pytest.raises(ValueError, match="of one format, got fp8 and int8"):
        multi_lora_linears(x, [one, int8], blocks)
    other = dataclasses.replace(p["w"], fp8_backward=False)
    other = dataclasses.replace(one, w=other)
    with pytest.raises(ValueError, match=r"same fp8_backward, got \[True, False\]"):
        multi_lora_linears(x, [one, other], blocks)


def test_a_frozen_linear_needs_a_quantized_weight():
    with pytest.raises(ValueError, match=r"wanted a quantized weight.*jnp\.matmul"):
        frozen_linear(jnp.ones((64, 8)), jnp.ones((8, 8)), None, jnp.zeros(1, int))


def test_back_ends_refuse_formats_that_they_cannot_read(monkeypatch):
    monkeypatch.setattr(triton, "unsupported_device", lambda: None)
    shape = LinearShape(
        dtype=jnp.bfloat16,
        in_features=256,
        out_features=256,
        rank=8,
        block_tokens=64,
        weight_format="fp8",
    )
    assert "fp8" in str(triton.unsupported(shape))
    for name in ("int8", "nf4", None):  # they get a dequantized copy
        assert (
            triton.unsupported(dataclasses.replace(shape, weight_format=name)) is None
        )

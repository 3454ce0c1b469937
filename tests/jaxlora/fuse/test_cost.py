"""Predicted times are near the measured ones, and decide whether a site is fused."""

import csv
import dataclasses
import pathlib

import jax.numpy as jnp
import pytest
from jax import lax

from jaxlora.fuse.api import FuseOptions, trace_call
from jaxlora.fuse.cost import decide, decide_shape, format_time, formed_costs
from jaxlora.fuse.device_rates import describe_device
from jaxlora.fuse.explain import explain_sites
from jaxlora.fuse.site_shape import SiteShape
from tests.jaxlora.fuse.linears import shape as array

H200 = "NVIDIA H200"
LINEAR = SiteShape(
    tokens=8192, in_features=4096, out_features=(4096,), ranks=(16,), masks=1
)


def change(**fields):
    return dataclasses.replace(LINEAR, **fields)


# Times of a model of the whole data flow, whose kernels were compared with XLA's.
PREDICTED = pathlib.Path(__file__).with_name("predicted_times.csv")


@pytest.mark.parametrize("tokens", ["256", "1024", "2048", "8192", "32768"])
def test_times_and_decisions_are_those_of_the_data_flow(tokens):
    rows = [
        r
        for r in csv.DictReader(PREDICTED.read_text().splitlines())
        if r["tokens"] == tokens
    ]
    assert len(rows) >= 5
    for row in rows:
        widths = tuple(map(int, row["out_features"].split("+")))
        has_dropout = row["has_dropout"] == "1"
        found = decide_shape(
            SiteShape(
                tokens=int(row["tokens"]),
                in_features=int(row["in_features"]),
                out_features=widths,
                ranks=(int(row["rank"]),) * len(widths),
                adapters=int(row["adapters"]),
                masks=len(widths) * has_dropout,
                draws_masks=has_dropout,
            ),
            H200,
        )
        forward, plain, fused = (
            float(row[f"{name}_us"]) for name in ("plain_forward", "plain", "fused")
        )
        assert 1e6 * found.forward_before.seconds == pytest.approx(forward, rel=0.035)
        assert 1e6 * found.before.seconds == pytest.approx(plain, rel=0.035)
        assert 1e6 * found.after.seconds == pytest.approx(fused, rel=1e-3)
        if abs(plain / fused - 1) > 0.01:
            assert found.fused == (fused < plain)


# Medians of docs/measured/kernels.csv: `jaxlora mosaic`, forward and both, at cd711e5.
@pytest.mark.parametrize(
    "shape, forward_us, both_us",
    [
        (LINEAR, 376, 789),
        (change(adapters=4), 380, 789),
        (change(adapters=4, masks=0), 378, 780),
        (change(adapters=4, out_features=(14336,)), 1326, 2698),
        (change(adapters=4, in_features=14336), 1348, 2766),
        (change(adapters=4, tokens=16384), 768, 1583),
        (change(adapters=4, out_features=(1024,)), 118, 268),
    ],
)
def test_fused_times_are_those_measured(shape, forward_us, both_us):
    decision = decide_shape(shape, H200)
    assert 1e6 * decision.forward_after.seconds == pytest.approx(forward_us, rel=0.2)
    assert 1e6 * decision.after.seconds == pytest.approx(both_us, rel=0.1)


@pytest.mark.parametrize(
    "shape",
    [
        LINEAR,
        change(masks=0),
        change(adapters=4),
        change(out_features=(14336,)),
        change(out_features=(4096, 1024, 1024), ranks=(16, 16, 16), masks=3),
        change(draws_masks=True),
    ],
)
def test_large_sites_are_fused(shape):
    decision = decide_shape(shape, H200)
    assert decision.fused and decision.speedup > 1
    assert decision.after.num_bytes < decision.before.num_bytes
    assert "times as fast" in decision.reason


@pytest.mark.parametrize(
    "shape",
    [
        change(tokens=128),
        change(in_features=256, out_features=(256,)),
        change(ranks=(4096,)),
    ],
)
def test_sites_that_do_not_pay_are_left_alone(shape):
    """Launches decide in the first two, and in the last s is as wide as y."""
    decision = decide_shape(shape, H200)
    assert not decision.fused
    assert "slower" in decision.reason


def test_linears_that_share_x_gain_more_than_one():
    each = decide_shape(change(out_features=(1024,)), H200)
    both = decide_shape(
        change(out_features=(1024, 1024), ranks=(16, 16), masks=2), H200
    )
    assert both.after.seconds < 2 * each.after.seconds
    assert both.speedup > each.speedup


def test_random_bits_cost_as_much_before_as_after():
    given, drawn = (
        decide_shape(LINEAR, H200),
        decide_shape(change(draws_masks=True), H200),
    )
    before = drawn.before.seconds - given.before.seconds
    after = drawn.after.seconds - given.after.seconds
    assert before > 100e-6 and after > 100e-6
    assert drawn.speedup < given.speedup


def test_a_bias_costs_time_before_only():
    biased = decide_shape(change(bias=True), H200)
    plain = decide_shape(LINEAR, H200)
    assert biased.before.seconds > plain.before.seconds
    assert biased.after == plain.after


def test_the_back_end_in_plain_jax_saves_nothing():
    decision = decide_shape(LINEAR, H200, "xla")
    assert decision.before == decision.after
    assert decision.reason == "the back end xla is plain JAX and saves no time"


def test_devices_differ_and_an_unknown_one_is_a_typical_gpu():
    speeds = [
        decide_shape(LINEAR, kind).after.seconds for kind in (H200, "NVIDIA L40S")
    ]
    assert speeds[0] < speeds[1]
    assert describe_device("cpu").name == "unknown"
    assert decide_shape(LINEAR, "cpu").fused


def test_times_are_readable():
    assert [format_time(s) for s in (1.23e-6, 1.234e-3, 0.0123)] == [
        "1.2 us",
        "1,234 us",
        "12.3 ms",
    ]


def test_a_forward_pass_that_keeps_s_gains_less():
    """A function that already is a gradient computes s and the dropped x for it too."""
    whole = decide_shape(LINEAR, H200)
    kept = decide_shape(LINEAR, H200, keeps_s=True)
    assert kept.before == whole.forward_before
    assert kept.after.seconds > whole.forward_after.seconds
    assert kept.speedup < whole.speedup


# Products of arrays that the kernels read as one.

T, K, N, R = 8192, 4096, 4096, 16


def of(function, *more, tokens=T, w=None, k=K, n=N):
    """Returns the shape of the only site of a function, and the decision."""
    w = array(k, n) if w is None else w
    args = array(tokens, k), w, array(k, R), array(R, n), *more
    program = trace_call(function, FuseOptions(), args, {})
    (site,) = program.rewritten.sites
    return SiteShape.of(site), decide(site, H200)


def linear(x, w, a, b):
    return x @ w + (x @ a) @ b


def scaled(x, w, a, b, scale):
    return (x @ w.astype(x.dtype)) * scale + (x @ a) @ b


def test_a_scale_of_the_weight_that_may_be_trained_costs_more_than_it_gains():
    """Its gradient needs dW, a product as large as the frozen one."""
    shape, decision = of(scaled, array(N))
    (formed,) = shape.formed
    assert (formed.role, formed.is_trained) == ("w", True)
    assert not decision.fused
    assert "to form W" in decision.reason
    dw = 2 * T * K * N / describe_device(H200).matmul_flops
    plain = of(linear)[1]
    assert decision.after.seconds - plain.after.seconds > 0.9 * dw
    forward = decision.forward_after.seconds - plain.forward_after.seconds
    assert forward == pytest.approx(formed_costs(formed, shape, h200())[0].seconds)


def h200():
    return describe_device(H200)


FROZEN = {
    "codes": (scaled, array(K, N, dtype=jnp.int8)),
    "codes in float8": (scaled, array(K, N, dtype=jnp.float8_e4m3fn)),
    "stopped": (lambda x, w, a, b, s: scaled(x, w, a, b, lax.stop_gradient(s)), None),
}


@pytest.mark.parametrize("name", FROZEN)
def test_a_scale_of_the_weight_that_is_frozen_costs_a_pass_over_the_weight(name):
    function, w = FROZEN[name]
    shape, decision = of(function, array(N), w=w)
    assert not shape.formed[0].is_trained and decision.fused
    extra = decision.after.num_bytes - of(linear)[1].after.num_bytes
    assert extra == pytest.approx(2 * 2 * K * N, rel=0.01)


def test_the_weight_decides_from_how_many_tokens_a_scale_is_worth_it():
    """A pass over W takes as long for few tokens as for many."""
    w = array(K, N, dtype=jnp.int8)
    fused = [of(scaled, array(N), w=w, tokens=t)[1].fused for t in (1024, 8192)]
    assert fused == [False, True]


def factored(x, w, a, b, c):
    return x @ w + ((x @ c) @ a) @ b


def factored_first(x, w, a, b, c):
    return x @ w + (x @ (c @ a)) @ b


def two_factors(function, inner, tokens=T):
    arrays = array(tokens, K), array(K, N), array(inner, R), array(R, N)
    program = trace_call(function, FuseOptions(), (*arrays, array(K, inner)), {})
    (site,) = program.rewritten.sites
    return SiteShape.of(site), decide(site, H200)


def test_a_product_of_two_matrices_is_formed_once():
    """If the function forms it too, that costs as much before as after."""
    shape, decision = two_factors(factored, 4096)
    assert [(f.role, f.num_factors) for f in shape.formed] == [("a", 2)]
    assert decision.after.seconds > of(linear)[1].after.seconds
    shape, decision = two_factors(factored_first, 4096)
    assert not shape.formed
    assert decision.after.seconds == of(linear)[1].after.seconds


def vera(x, w, a, b, d, ids):
    return x @ w + ((x @ a) * d[ids][:, None]) @ b


def of_vera(adapters):
    args = array(64, 128, K), array(K, N), array(K, R), array(R, N)
    ids = array(64, dtype=jnp.int32)
    program = trace_call(vera, FuseOptions(), (*args, array(adapters, R), ids), {})
    (site,) = program.rewritten.sites
    return SiteShape.of(site), decide(site, H200)


def test_many_adapters_that_share_a_matrix_cost_more_to_form_than_they_gain():
    """The kernels read an A or B of each adapter, where the function reads one."""
    few, many = of_vera(4), of_vera(512)
    assert few[1].fused and not many[1].fused
    assert "to form A, B" in many[1].reason
    shape, decision = many
    alone = decide_shape(dataclasses.replace(shape, formed=()), H200)
    forming = sum(formed_costs(f, shape, h200())[1].seconds for f in shape.formed)
    assert decision.after.seconds == pytest.approx(alone.after.seconds + forming)
    assert decision.after.seconds > decision.before.seconds > 0


def test_a_scale_of_the_sum_costs_as_much_before_as_after():
    """DoRA's magnitude is multiplied behind the kernels, without a gradient of W."""

    def dora(x, w, a, b, m):
        base = x @ w
        return base + (m - 1) * base + m * ((x @ a) @ b)

    shape, decision = of(dora, array(N))
    assert (shape.scales, shape.formed) == (1, ())
    plain = of(linear)[1]
    passes = decision.after.num_bytes - plain.after.num_bytes
    assert passes == 5 * 2 * T * N
    assert decision.fused and decision.before.seconds > plain.before.seconds


def test_explain_says_what_forming_costs():
    args = array(T, K), array(K, N), array(K, R), array(R, N), array(N)
    program = trace_call(scaled, FuseOptions(), args, {})
    text = str(explain_sites(program.traced, program.rewritten, H200))
    text = " ".join(text.split())
    assert "not fused" in text and "to form W" in text

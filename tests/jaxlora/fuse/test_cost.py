"""Predicted times are near the measured ones, and decide whether a site is fused."""

import dataclasses

import pytest

from jaxlora.fuse.cost import decide_shape, format_time
from jaxlora.fuse.kernel_rates import describe_device
from jaxlora.fuse.site_shape import SiteShape

H200 = "NVIDIA H200"
LINEAR = SiteShape(
    tokens=8192, in_features=4096, out_features=(4096,), ranks=(16,), masks=1
)


def change(**fields):
    return dataclasses.replace(LINEAR, **fields)


# Medians of docs/kernels.csv: `jaxlora mosaic`, forward and both, commit cd711e5.
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

import jax
import pytest
from jax.experimental.mosaic.gpu import profiler

from scripts import bench_kernels, bench_parts
from scripts.bench_report import Timing, device_times


class Cupti:
    """As jax's: a list of milliseconds, but a number for one iteration."""

    def __init__(self, finalize):
        assert not finalize

    def measure(self, run, iterations):
        times = 0.5 if iterations == 1 else [0.5] * iterations
        return lambda *args: (run(*args), times)


@pytest.mark.parametrize("repeats", [1, 2])
def test_device_times_are_one_for_each_call(repeats, monkeypatch):
    monkeypatch.setattr(profiler, "Cupti", Cupti)
    assert device_times(lambda x: x, 1, repeats=repeats) == [500.0] * repeats
    found = bench_parts.timed(lambda x: x, (jax.numpy.ones(1),), repeats)
    assert found["device_us"] == 500.0


def timed(method, what, median):
    return method, what, Timing(median, median, median)


def test_ratios_are_over_the_frozen_layer_wherever_it_comes():
    slow, quick = timed("other", "both", 30.0), timed("other", "forward", 3.0)
    frozen = timed("frozen", "both", 20.0)
    assert bench_kernels.ratios([slow, quick, frozen]) == [1.5, None, 1.0]
    assert bench_kernels.ratios([slow, quick]) == [None, None]


def test_a_plot_leaves_out_what_has_no_ratio(tmp_path):
    def row(method, ratio):
        return {"case": "c", "method": method, "pass": "both", "ratio": ratio}

    bench_kernels.plot([row("other", None)], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    bench_kernels.plot([row("frozen", 1.0), row("other", None)], tmp_path / "one.png")
    assert (tmp_path / "one.png").exists()

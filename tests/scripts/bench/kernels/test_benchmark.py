import pytest
from jax.experimental.mosaic.gpu import profiler

from scripts.bench.kernels import benchmark
from scripts.bench.report import Timing, device_times


class Cupti:
    """Returns a list of milliseconds, but a number for one iteration, as JAX's does."""

    def __init__(self, finalize):
        assert not finalize

    def measure(self, run, iterations):
        times = 0.5 if iterations == 1 else [0.5] * iterations
        return lambda *args: (run(*args), times)


@pytest.mark.parametrize("repeats", [1, 2])
def test_device_times_are_one_for_each_call(repeats, monkeypatch):
    monkeypatch.setattr(profiler, "Cupti", Cupti)
    assert device_times(lambda x: x, 1, repeats=repeats) == [500.0] * repeats


def timed(method, what, median):
    return method, what, Timing(median, median, median)


def test_ratios_are_over_the_frozen_layer_wherever_it_is():
    slow, quick = timed("other", "both", 30.0), timed("other", "forward", 3.0)
    frozen = timed("frozen", "both", 20.0)
    found = [row["ratio"] for row in benchmark.with_ratios([slow, quick, frozen])]
    assert found == [1.5, None, 1.0]
    assert [row["ratio"] for row in benchmark.with_ratios([slow])] == [None]


def test_ratios_to_a_methods_own_frozen_product(monkeypatch):
    monkeypatch.setattr(benchmark, "OWN_FROZEN", {"a": "frozen a"})
    timings = [timed("a", "both", 30.0), timed("frozen a", "both", 20.0)]
    found = list(benchmark.with_ratios(timings))
    assert [row["own_ratio"] for row in found] == [1.5, None]
    assert (found[0]["median_us"], found[0]["p10_us"]) == (30.0, 30.0)


def row(method, what, ratio):
    names = {"case": "c", "method": method, "pass": what}
    return {**names, "median_us": 20.0, "ratio": ratio}


def test_the_table_has_a_column_for_each_method():
    rows = [
        row("frozen", "both", 1.0),
        row("other", "forward", 1.2),
        row("other", "both", 1.5),
        row("other", "both, sustained", 1.4),
        row("more", "both", None),
        row("own", "both", 2.0) | {"own_ratio": 1.1},
    ]
    table = benchmark.ratios_table(rows).splitlines()
    assert table[0] == (
        "| time over the frozen layer | frozen | other | other, sustained | more "
        "| own |"
    )
    assert table[2:] == ["| c | 20.0 us | 1.5 | 1.4 | 20.0 us | 2.0 (1.1 of its own) |"]

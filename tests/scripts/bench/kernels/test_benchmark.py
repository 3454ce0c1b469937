import pytest
from jax.experimental.mosaic.gpu import profiler

from scripts.bench.kernel_times import device_times
from scripts.bench.kernels import benchmark
from scripts.bench.report import Timing


class Cupti:
    """Returns the kernels of each iteration, but a flat list for one, as JAX's does."""

    def __init__(self, finalize):
        assert not finalize

    def measure(self, run, aggregate, iterations):
        call = [("a", 0.125), ("b", 0.375)]
        calls = call if iterations == 1 else [call] * iterations
        return lambda *args: (run(*args), calls)


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
    ]
    table = benchmark.ratios_table(rows).splitlines()
    assert table[0] == (
        "| time over the frozen layer | frozen | other | other, sustained | more |"
    )
    assert table[2:] == ["| c | 20.0 us | 1.5 | 1.4 | 20.0 us |"]

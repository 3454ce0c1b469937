import pytest

from jaxlora.scheduler import Limits
from scripts import bench_fill


def test_more_steps_a_window_never_need_more_microbatches():
    given = bench_fill.samples((2, 5, 3))
    limits = Limits(capacity=4096, block_tokens=64)
    numbers = []
    for steps, packer in bench_fill.WINDOWS:
        share, number, fewest = bench_fill.fill(given, limits, steps, packer)
        assert fewest <= number
        assert share * number * 4096 == pytest.approx(sum(s.num_tokens for s in given))
        numbers.append(number)
    assert numbers == sorted(numbers, reverse=True)

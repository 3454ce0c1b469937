import pytest

from jaxlora.bench.scheduler import fill
from jaxlora.scheduler import Limits


def test_more_steps_in_a_window_never_need_more_microbatches():
    given = fill.samples((2, 5, 3))
    limits = Limits(capacity=4096, block_tokens=64)
    numbers = []
    for steps, packer in fill.WINDOWS:
        share, number, fewest = fill.fill(given, limits, steps, packer)
        assert fewest <= number
        assert share * number * 4096 == pytest.approx(sum(s.num_tokens for s in given))
        numbers.append(number)
    assert numbers == sorted(numbers, reverse=True)

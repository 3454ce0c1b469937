"""The oldest samples that wait fill the next microbatch."""

from jaxlora.scheduler import Limits, Sample
from jaxlora.scheduler.stream.waiting import fill_oldest_first


def waiting(*owners_and_tokens):
    return [
        Sample(owner=owner, batch=0, index=i, num_tokens=tokens)
        for i, (owner, tokens) in enumerate(owners_and_tokens)
    ]


def test_the_oldest_come_first_and_later_ones_fill_the_room():
    samples = waiting((1, 9), (0, 5), (1, 8), (0, 3), (1, 7))
    # Owner 1 has 9 tokens in 3 blocks of 4, and owner 0 has 5 and 3 in 2.
    limits = Limits(capacity=20, block_tokens=4)
    found = fill_oldest_first(samples, limits)
    assert [(s.owner, s.index) for s in found] == [(0, 1), (0, 3), (1, 0)]


def test_blocks_and_the_number_of_samples_are_limits():
    samples = waiting((0, 1), (1, 1), (2, 1), (0, 1))
    limits = Limits(capacity=8, block_tokens=4)
    assert [s.index for s in fill_oldest_first(samples, limits)] == [0, 3, 1]
    limits = Limits(capacity=8, block_tokens=4, max_samples=1)
    assert [s.index for s in fill_oldest_first(samples, limits)] == [0]
    assert fill_oldest_first([], limits) == ()
    limits = Limits(capacity=12, block_tokens=4, max_jobs=2)
    assert [s.index for s in fill_oldest_first(samples, limits)] == [0, 3, 1]

"""Which waiting jobs start."""

import pytest

from scheduler.admission import Candidate, admit


def admitted(waiting, *args, **kwargs):
    return [c.job for c in admit(waiting, *args, **kwargs)]


def test_priority_then_first_come():
    waiting = [Candidate(job=j, priority=p) for j, p in enumerate((0, 2, -1, 2, 0))]
    assert admitted(waiting, 5) == [1, 3, 0, 4, 2]
    assert admitted(waiting, 2) == [1, 3]
    assert admitted(waiting, 0) == []
    assert admitted([], 3) == []


def test_estimates_stay_within_memory():
    waiting = [
        Candidate(job=j, memory_bytes=m, priority=p)
        for j, (m, p) in enumerate([(4, 0), (6, 1), (5, 0), (1, 0)])
    ]
    assert admitted(waiting, 4, memory_left=10) == [1, 0]
    # Job 2 does not fit and lets nobody past it.
    assert admitted(waiting, 4, memory_left=11) == [1, 0]
    assert admitted(waiting, 4, memory_left=16) == [1, 0, 2, 3]
    assert admitted(waiting, 4, memory_left=5) == []


@pytest.mark.parametrize("estimate", [-1.0, float("nan")])
def test_estimates_that_are_none(estimate):
    with pytest.raises(ValueError, match="an estimate is 0 or more"):
        admit([Candidate(job=7, memory_bytes=estimate)], 1)

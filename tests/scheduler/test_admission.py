"""Tests which jobs start and which are paused."""

import pytest

from jaxlora.scheduler.admission import Candidate, admit, preempt


def admitted(waiting, *args, **kwargs):
    return [c.job for c in admit(waiting, *args, **kwargs)]


def test_orders_by_priority_then_arrival():
    waiting = [Candidate(job=j, priority=p) for j, p in enumerate((0, 2, -1, 2, 0))]
    assert admitted(waiting, 5) == [1, 3, 0, 4, 2]
    assert admitted(waiting, 2) == [1, 3]
    assert admitted(waiting, 0) == []
    assert admitted([], 3) == []


def test_admitted_jobs_fit_in_memory():
    waiting = [
        Candidate(job=j, memory_bytes=m, priority=p)
        for j, (m, p) in enumerate([(4, 0), (6, 1), (5, 0), (1, 0)])
    ]
    assert admitted(waiting, 4, memory_left=10) == [1, 0]
    # Job 2 does not fit, and blocks the jobs behind it.
    assert admitted(waiting, 4, memory_left=11) == [1, 0]
    assert admitted(waiting, 4, memory_left=16) == [1, 0, 2, 3]
    assert admitted(waiting, 4, memory_left=5) == []


@pytest.mark.parametrize("estimate", [-1.0, float("nan")])
def test_refuses_invalid_estimates(estimate):
    with pytest.raises(ValueError, match="An estimate must be at least 0"):
        admit([Candidate(job=7, memory_bytes=estimate)], 1)


def preempted(running, waiting, *args, **kwargs):
    """Calls `preempt` with jobs given as (number, priority, bytes)."""
    found = preempt(
        *(
            [Candidate(job=j, priority=p, memory_bytes=m) for j, p, m in jobs]
            for jobs in (running, waiting)
        ),
        *args,
        **kwargs,
    )
    return [c.job for c in found.paused], [c.job for c in found.started]


def test_only_a_higher_priority_preempts():
    running = [(0, 1, 0), (1, 0, 0), (2, 0, 0)]
    assert preempted(running, [(3, 0, 0)], 3) == ([], [])
    assert preempted(running, [(3, 1, 0)], 3) == ([2], [3])  # the last to arrive
    assert preempted(running, [(3, 1, 0), (4, 2, 0)], 3) == ([2, 1], [4, 3])
    assert preempted(running, [(3, 1, 0)], 4) == ([], [3])  # there is room
    assert preempted(running, [(5, 0, 0), (3, 2, 0)], 4) == ([], [3])


def test_preemption_stays_within_memory():
    running = [(0, 0, 6), (1, 0, 3)]
    # Job 1 is the first candidate, but it can stay once job 0 is paused.
    assert preempted(running, [(2, 1, 5)], 4, memory_bytes=10) == ([0], [2])
    assert preempted(running, [(2, 1, 8)], 4, memory_bytes=10) == ([1, 0], [2])
    assert preempted(running, [(2, 1, 4)], 4, memory_bytes=10) == ([1], [2])
    # No job is paused for one that would still not fit. It blocks the jobs behind it.
    assert preempted(running, [(2, 1, 11), (3, 0, 1)], 4, memory_bytes=10) == ([], [])
    with pytest.raises(ValueError, match="An estimate must be at least 0"):
        preempted([(0, 0, -1)], [], 1)

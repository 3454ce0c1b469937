"""Tests which jobs start and which are paused."""

import random

from jaxlora.scheduler.admission import Candidate, admit


def admitted(waiting, num_free):
    running = [Candidate(job=9 + i, priority=-9) for i in range(3)]
    paused, started = admit(running, waiting, 3 + num_free, preempts=False)
    assert not paused
    return [c.job for c in started]


def test_orders_by_priority_then_arrival():
    waiting = [Candidate(job=j, priority=p) for j, p in enumerate((0, 2, -1, 2, 0))]
    assert admitted(waiting, 5) == [1, 3, 0, 4, 2]
    assert admitted(waiting, 2) == [1, 3]
    assert admitted(waiting, 0) == []
    assert admitted(waiting, -1) == []
    assert admitted([], 3) == []


def preempted(running, waiting, num_slots):
    """Calls `admit` with jobs given as (number, priority)."""
    jobs = ([Candidate(job=j, priority=p) for j, p in js] for js in (running, waiting))
    paused, started = admit(*jobs, num_slots, preempts=True)
    return [c.job for c in paused], [c.job for c in started]


def test_only_a_higher_priority_preempts():
    running = [(0, 1), (1, 0), (2, 0)]
    assert preempted(running, [(3, 0)], 3) == ([], [])
    assert preempted(running, [(3, 1)], 3) == ([2], [3])  # the last to arrive
    assert preempted(running, [(3, 1), (4, 2)], 3) == ([2, 1], [4, 3])
    assert preempted(running, [(3, 1)], 4) == ([], [3])  # there is room
    assert preempted(running, [(5, 0), (3, 2)], 4) == ([], [3])


def test_more_may_run_than_there_is_room_for_now():
    running = [(0, 1), (1, 0), (2, 0)]
    assert preempted(running, [(3, 0)], 2) == ([], [])
    assert preempted(running, [(3, 2)], 2) == ([2, 1], [3])
    assert preempted(running, [(3, 1)], 1) == ([], [])  # job 0 would have to leave


def test_random_choices_keep_the_rules():
    rng = random.Random(0)
    for _ in range(300):
        priorities = [rng.randrange(4) for _ in range(rng.randrange(1, 9))]
        cut, num_slots = rng.randrange(len(priorities) + 1), rng.randrange(1, 6)
        jobs = list(enumerate(priorities))
        running, waiting = jobs[:cut][:num_slots], jobs[cut:]
        paused, started = preempted(running, waiting, num_slots)
        kept = [p for j, p in running if j not in paused]
        assert len(kept) + len(started) <= num_slots
        given = dict(jobs)
        if paused:
            assert min(given[j] for j in started) > max(given[j] for j in paused)
            assert len(kept) + len(started) == num_slots
        if left := [given[j] for j, _ in waiting if j not in started]:
            assert len(kept) + len(started) == num_slots
            assert not kept or max(left) <= min(kept)
            assert max(left) <= min([given[j] for j in started], default=9)

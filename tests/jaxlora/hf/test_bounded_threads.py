"""Threads that load weights: bounded memory, errors, and interruption."""

import itertools
import os
import signal
import threading
import time

import pytest

from jaxlora.hf.bounded_threads import map_in_threads


def run_all(functions, *, num_bytes=lambda function: 1, **limits):
    """Calls functions that get the check."""
    call = lambda function, check: function(check)
    return map_in_threads(call, functions, num_bytes=num_bytes, **limits)


def test_results_are_in_the_order_of_the_tasks():
    functions = [lambda check, i=i: i for i in range(40)]
    assert run_all(functions, max_bytes=7, num_threads=5) == list(range(40))
    assert run_all([], max_bytes=1, num_threads=1) == []


def test_as_many_tasks_run_at_a_time_as_the_bytes_allow():
    """Three of 10 bytes fit into 35; they wait for each other, so that three do run."""
    together, lock = threading.Barrier(3, timeout=600), threading.Lock()
    running = most = 0

    def run(check):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        with lock:
            running -= 1

    run_all([run] * 12, num_bytes=lambda _: 10, max_bytes=35, num_threads=8)
    assert most == 3


def test_a_task_that_is_too_large_runs_alone():
    lock, running, pairs = threading.Lock(), set(), set()

    def run(number, check):
        with lock:
            running.add(number)
            pairs.update(itertools.combinations(sorted(running), 2))
        check()
        with lock:
            running.remove(number)

    sizes = [1, 2, 99, 1, 1, 50, 3]
    map_in_threads(
        run, range(7), num_bytes=sizes.__getitem__, max_bytes=9, num_threads=4
    )
    assert not any({2, 5} & set(pair) for pair in pairs)


def test_the_first_error_in_order_is_raised():
    """Task 2 fails after task 5 has; those that come later do not run to their end."""
    failed, ended = threading.Event(), []

    def second(check):
        assert failed.wait(60)
        check()  # it is before the one that failed
        raise ValueError("second")

    def fifth(check):
        failed.set()
        raise ValueError("fifth")

    def long(check):
        end = time.monotonic() + 20
        while time.monotonic() < end:
            check()
        ended.extend([long] * 100)

    functions = [lambda check: ended.append(check)] * 100
    functions[2], functions[3], functions[5], functions[6] = second, long, fifth, long
    with pytest.raises(ValueError, match="second"):
        run_all(functions, max_bytes=9, num_threads=4)
    assert len(ended) < 15


def test_an_interrupt_ends_all_tasks():
    ended = []

    def run(check):
        try:
            while True:
                check()
        finally:
            ended.append(1)

    def interrupt(check):
        os.kill(os.getpid(), signal.SIGINT)
        run(check)

    # A shell starts background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_all([run, interrupt] + [run] * 20, max_bytes=4, num_threads=3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(ended) <= 4
    # One that is being started in that moment ends by itself.
    for thread in threading.enumerate():
        if thread.name.startswith("load_"):
            thread.join(60)
            assert not thread.is_alive()

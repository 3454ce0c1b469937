"""Runs a function in threads, while the memory that all calls need is bounded."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax


def map_in_threads[S, T](
    run: Callable[[S, Callable[[], None]], T],
    items: Sequence[S],
    *,
    num_bytes: Callable[[S], int],
    max_bytes: int,
    num_threads: int,
) -> list[T]:
    """Calls a function with each item in threads; returns the results in their order.

    Calls begin in the order of the items. If one fails, those before it are finished,
    because one of them may fail as well; those after it are abandoned.

    Args:
        run: The function, which sees JAX's default device of the calling thread. Its
            second argument is a function that it calls now and then, and that raises an
            error if the work is no longer wanted.
        items: Its first arguments.
        num_bytes: Bytes that a call with an item needs while it runs.
        max_bytes: Bytes that calls may need at a time. One that needs more runs alone.
        num_threads: Number of threads.

    Raises:
        Exception: Error of the first of the calls that fail.
    """
    device = jax.config.jax_default_device  # each thread has its own
    changed = threading.Condition()
    total, last = 0, len(items)  # of running calls; those after `last` are unwanted

    def check(number: int) -> None:
        if number > last:
            raise _AbandonedError

    def call(number: int, item: S, size: int) -> T:
        nonlocal total, last
        try:
            check(number)
            with jax.default_device(device):
                return run(item, lambda: check(number))
        except BaseException:
            with changed:
                last = min(last, number)
            raise
        finally:
            with changed:
                total -= size
                changed.notify()

    futures: list[Future[T]] = []
    with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as pool:
        try:
            for number, item in enumerate(items):
                size = num_bytes(item)
                with changed:
                    while total and total + size > max_bytes and last == len(items):
                        changed.wait()
                    total += size
                if last < len(items):
                    break
                futures.append(pool.submit(call, number, item, size))
            wait(futures)
        except BaseException:  # in particular KeyboardInterrupt
            with changed:
                last = -1
            raise
    return [future.result() for future in futures]


class _AbandonedError(Exception):
    """A call is no longer wanted."""

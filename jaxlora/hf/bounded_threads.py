"""Runs tasks in threads, while the memory that all of them need is bounded."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task[T]:
    """One piece of work.

    Attributes:
        num_bytes: Bytes that it needs while it runs.
        run: Does the work. Its argument is a function that it calls now and then, and
            that raises an error if the work is no longer wanted.
    """

    num_bytes: int
    run: Callable[[Callable[[], None]], T]


def run_tasks[T](
    tasks: Sequence[Task[T]], *, max_bytes: int, num_threads: int
) -> list[T]:
    """Runs tasks in threads and returns their results, in the order of the tasks.

    Tasks begin in their order. If one fails, those before it are finished, because one
    of them may fail as well; those after it are abandoned.

    Args:
        tasks: The tasks. They see JAX's default device of the calling thread.
        max_bytes: Bytes that tasks may need at a time. A task that needs more runs
            alone.
        num_threads: Number of threads.

    Raises:
        Exception: Error of the first of the tasks that fail.
    """
    device = jax.config.jax_default_device  # each thread has its own
    changed = threading.Condition()
    num_bytes, last = 0, len(tasks)  # of running tasks; tasks after `last` are unwanted

    def check(number: int) -> None:
        if number > last:
            raise _AbandonedError

    def may_begin(task: Task[T]) -> bool:
        fits = not num_bytes or num_bytes + task.num_bytes <= max_bytes
        return fits or last < len(tasks)

    def run(number: int, task: Task[T]) -> T:
        nonlocal num_bytes, last
        try:
            check(number)
            with jax.default_device(device):
                return task.run(lambda: check(number))
        except BaseException:
            with changed:
                last = min(last, number)
            raise
        finally:
            with changed:
                num_bytes -= task.num_bytes
                changed.notify()

    futures: list[Future[T]] = []
    with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as pool:
        try:
            for number, task in enumerate(tasks):
                with changed:
                    changed.wait_for(functools.partial(may_begin, task))
                    num_bytes += task.num_bytes
                if last < len(tasks):
                    break
                futures.append(pool.submit(run, number, task))
            wait(futures)
        except BaseException:  # in particular KeyboardInterrupt
            with changed:
                last = -1
            raise
    return [future.result() for future in futures]


class _AbandonedError(Exception):
    """A task is no longer wanted."""

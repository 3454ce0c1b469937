"""Runs tasks in threads, while the memory that all of them need is bounded."""

import dataclasses
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
    admitted = _Admitted(max_bytes)
    device = jax.config.jax_default_device  # each thread has its own
    futures: list[Future[T]] = []

    def run(number: int, task: Task[T]) -> T:
        try:
            admitted.check(number)
            with jax.default_device(device):
                return task.run(lambda: admitted.check(number))
        except BaseException:
            admitted.abandon_after(number)
            raise
        finally:
            admitted.remove(task.num_bytes)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as pool:
        try:
            for number, task in enumerate(tasks):
                if not admitted.add(task.num_bytes):
                    break
                futures.append(pool.submit(run, number, task))
            wait(futures)
        except BaseException:  # in particular KeyboardInterrupt
            admitted.abandon_after(-1)
            raise
    return [future.result() for future in futures]


class _AbandonedError(Exception):
    """A task is no longer wanted."""


class _Admitted:
    """The tasks that run or are about to run."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._first_failed: int | None = None
        self._changed = threading.Condition()

    def add(self, num_bytes: int) -> bool:
        """Waits until a task may run; returns False if none may run any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._may_add(num_bytes))
            if self._first_failed is not None:
                return False
            self._num_bytes += num_bytes
            return True

    def _may_add(self, num_bytes: int) -> bool:
        is_free = self._num_bytes == 0
        fits = self._num_bytes + num_bytes <= self._max_bytes
        return is_free or fits or self._first_failed is not None

    def remove(self, num_bytes: int) -> None:
        """Takes back the bytes of a task that has ended."""
        with self._changed:
            self._num_bytes -= num_bytes
            self._changed.notify()

    def abandon_after(self, number: int) -> None:
        """Says that the tasks after one, by its number, are no longer wanted."""
        with self._changed:
            if self._first_failed is None or number < self._first_failed:
                self._first_failed = number
            self._changed.notify()

    def check(self, number: int) -> None:
        """Raises an error if a task, given by its number, is no longer wanted."""
        if self._first_failed is not None and number > self._first_failed:
            raise _AbandonedError

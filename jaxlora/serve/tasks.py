"""What the engine's thread is asked for, and what other threads do for it."""

import contextlib
import functools
import queue
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait


class Tasks:
    """Messages to the engine's thread, and two other threads that work for it.

    Attributes:
        is_stopping: Whether the thread is to end.
    """

    def __init__(self):
        self.is_stopping = False
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._others = ThreadPoolExecutor(2, thread_name_prefix="hub")
        self._working: set[Future[None]] = set()

    def ask(self, message: Callable[[], None]) -> None:
        """Lets the engine's thread call a function. Any thread may call this."""
        self._inbox.put(message)

    def stop(self) -> None:
        """Lets the engine's thread end. Any thread may call this."""
        self.is_stopping = True
        self.ask(lambda: None)  # which wakes it

    def close(self) -> None:
        """Ends the other threads, when they have done all that they were given."""
        self._others.shutdown()

    def take(self, timeout: float | None = None) -> None:
        """Does what the engine's thread was asked for.

        Args:
            timeout: Seconds to wait for the first message; None: it does not.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get(timeout is not None, timeout)()
                timeout = None

    def run(self, work: Callable[[], None]) -> None:
        """Calls a function in another thread."""
        with contextlib.suppress(RuntimeError):  # the hub has ended
            task = self._others.submit(work)
            self._working.add(task)
            task.add_done_callback(self._working.discard)

    def elsewhere[T](
        self,
        work: Callable[[], T],
        then: Callable[[T], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Calls `work` in another thread, and goes on in the engine's.

        Args:
            work: The work.
            then: Gets what it returns.
            fail: Gets its error in place of that.
        """

        def run() -> None:
            try:
                found = work()
            except Exception as error:
                self.ask(functools.partial(fail, error))
            else:
                self.ask(functools.partial(then, found))

        self.run(run)

    def wait(self) -> None:
        """Waits for all that the other threads do, and for nothing that follows."""
        wait([*self._working])

    def finish(self, most: int = 0) -> None:
        """Waits until the other threads have at most so much to do, and goes on."""
        while len(working := [*self._working]) > most:
            wait(working, return_when=FIRST_COMPLETED)
            self.take()

    @property
    def is_busy(self) -> bool:
        """Whether the other threads have work, or the engine's has messages."""
        return bool(self._working) or not self._inbox.empty()

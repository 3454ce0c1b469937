"""Work in threads, such as compiling, and how a process ends while it goes on."""

import atexit
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger(__name__)

_NAME = "jaxlora-background"
# Names of threads begin with this if their pool is never shut down. The end of the
# process does not wait for them.
POOL = "jaxlora-pool"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def in_background[T](run: Callable[[], T]) -> Future:
    """Runs a function in a thread.

    The end of the process waits for it, as Python would end the thread of a daemon when
    it calls Python again. In the middle of XLA's compiler, that aborts the process.
    """
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    _watch_exit()
    threading.Thread(target=work, name=_NAME).start()
    return future


@functools.cache
def _watch_exit() -> None:
    # Python has waited for the threads before, unless Ctrl-C has ended that.
    atexit.register(end_process, 130)


def end_process(status: int) -> None:
    """Ends the process at once with a status, if it still works in the background."""
    others = set(threading.enumerate()) - {threading.current_thread()}
    if any(thread.name == _NAME for thread in others):
        for thread in others:  # such as one that writes a file
            is_ours = thread.name == _NAME or thread.name.startswith(POOL)
            if not (thread.daemon or is_ours):
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class StopRequest:
    """Context manager in which the first SIGINT or SIGTERM only asks for the end.

    A second signal is handled as it was before. Outside the main thread, where Python
    cannot install signal handlers, the context manager does nothing.

    Attributes:
        requested: Whether a signal has arrived.
    """

    def __init__(self, answer: str):
        """Makes the object.

        Args:
            answer: Text that says what happens now, for the log.
        """
        self.requested, self._answer = False, answer
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in _SIGNALS}
        return self

    def _note(self, number: int, frame: Any) -> None:
        self.requested = True
        self.__exit__()
        name = signal.Signals(number).name
        text = "%s: %s. Send it again to quit immediately."
        logger.warning(text, name, self._answer)

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

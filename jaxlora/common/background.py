"""Work in threads that the end of the process does not wait for."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

_NAME = "jaxlora-background"


def in_background[T](run: Callable[[], T]) -> Future:
    """Runs a function in a thread that does not keep the process from ending."""
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name=_NAME, daemon=True).start()
    return future


def end_process(status: int) -> None:
    """Ends the process with a status, if it still works in the background.

    When Python ends, it ends such a thread as soon as the thread calls Python again. In
    the middle of XLA's compiler, that aborts the process.
    """
    others = set(threading.enumerate()) - {threading.current_thread()}
    if any(thread.name == _NAME for thread in others):
        for thread in others:  # such as one that writes a file
            if not thread.daemon:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

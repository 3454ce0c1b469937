"""Work in threads, such as compiling, and how a process ends while it goes on."""

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

_NAME = "jaxlora-background"


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
            if not thread.daemon and thread.name != _NAME:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

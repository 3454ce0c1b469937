"""Python's collector of reference cycles, which work that makes many objects pauses."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pauses the collector, which is one for all threads, until the last block ends.

    Tracing and lowering make millions of long-lived objects, and so do imports. The
    collector would scan them repeatedly, which would take half of the time of tracing
    and an eighth of that of imports.
    """
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()

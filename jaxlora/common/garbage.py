"""Pauses Python's collector of reference cycles."""

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Pauses:
    """The blocks of all threads in which the collector pauses."""

    lock = threading.Lock()
    count = 0
    was_enabled = False


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pauses the collector for work that makes many objects which stay.

    Tracing and lowering make millions of them, and imports hundreds of thousands. The
    collector would scan them repeatedly, which would take half of the time of the
    former and an eighth of the latter. There is one collector for all threads, so it
    runs again when the last of them leaves such a block.
    """
    with _Pauses.lock:
        if not _Pauses.count:
            _Pauses.was_enabled = gc.isenabled()
            gc.disable()
        _Pauses.count += 1
    try:
        yield
    finally:
        with _Pauses.lock:
            _Pauses.count -= 1
            if not _Pauses.count and _Pauses.was_enabled:
                gc.enable()

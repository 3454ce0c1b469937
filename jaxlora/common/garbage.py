"""Pauses Python's collector of reference cycles."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pauses the collector for work that makes many objects which stay.

    Tracing and lowering make millions of them, and imports hundreds of thousands. The
    collector would scan them repeatedly, which would take half of the time of the
    former and an eighth of the latter.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

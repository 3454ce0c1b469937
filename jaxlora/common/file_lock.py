"""A lock among processes of a machine."""

import contextlib
import fcntl
import os
from collections.abc import Generator


@contextlib.contextmanager
def file_lock(path: str | os.PathLike) -> Generator[None]:
    """Waits until nobody else, in this process or another, has the lock of a file.

    The kernel wakes those that wait, and gives the lock back when a process ends.

    Args:
        path: The file, which is made if it is missing, and stays.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)

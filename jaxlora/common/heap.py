"""The C library's heap, which by default gives freed memory back at once."""

import contextlib
import ctypes

# Parameters of mallopt(3), by the numbers of malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# The first is the largest that is allowed. Fewer arenas would keep more memory, but
# programs then took twice as long to compile.
_SETTINGS = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 1 << 30}


def keep_freed_memory() -> None:
    """Lets this process keep up to a gibibyte of freed memory for its next arrays.

    The weights of jobs that start and end are arrays of a few mebibytes, for which
    glibc asks the kernel of the host each time. The kernel clears each page again, one
    thread at a time: 8,000 pages a job. Other C libraries are left as they are.
    """
    with contextlib.suppress(OSError, AttributeError):
        set_parameter = ctypes.CDLL(None).mallopt
        for parameter, value in _SETTINGS.items():
            set_parameter(parameter, value)

"""The C library's heap, which by default gives freed memory back at once."""

import contextlib
import ctypes

# Parameters of mallopt(3), by the numbers of malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# No larger threshold than 32 MiB is allowed for arrays. Fewer arenas would let threads
# share more of what they free, but programs then took twice as long to compile.
_SETTINGS = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 1 << 30}


def keep_freed_memory() -> None:
    """Lets this process keep freed memory for its next arrays.

    That is up to a gibibyte of the main thread, and about 100 MiB of each other one.

    The weights of jobs that start and end are arrays of a few mebibytes, for which
    glibc asks the kernel of the host each time. The kernel clears each page again, one
    thread at a time: 8,000 pages a job. Other C libraries are left as they are.
    """
    with contextlib.suppress(OSError, AttributeError):
        set_parameter = ctypes.CDLL(None).mallopt
        for parameter, value in _SETTINGS.items():
            set_parameter(parameter, value)

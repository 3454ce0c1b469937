"""The number of processor cores that this process may use."""

import os


def num_cores() -> int:
    """Returns how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

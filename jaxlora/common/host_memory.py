"""The memory of the host that this process may still take."""

import os
import pathlib
from collections.abc import Iterator

# The folder of a version of control groups, the line of /proc/self/cgroup that has the
# group, and files with its limit and its use.
_GROUPS = (
    ("sys/fs/cgroup", "", "memory.max", "memory.current"),
    (
        "sys/fs/cgroup/memory",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
    ),
)
_CACHED = ("inactive_file", "total_inactive_file")  # the second one with subgroups


def available_bytes(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Returns the bytes that can be taken without swapping.

    The system gives up caches of files for them, so these count; most of the memory of
    a machine that has just read a model is such a cache. In a container with a limit,
    what is left of it counts.

    Args:
        root: The folder with `proc` and `sys`.
    """
    return min(_available(root), *_left_in_groups(root))


def _available(root: pathlib.Path) -> int:
    found = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if found is None:  # as on a system other than Linux
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return found * 1024


def _left_in_groups(root: pathlib.Path) -> Iterator[int]:
    """Yields what is left of each limit of the control groups of this process.

    A group has the limits of those around it, too; Slurm sets that of the job.
    """
    yield 2**62
    lines = _text(root / "proc/self/cgroup").splitlines()
    own = {kinds: path for _, kinds, path in (line.split(":", 2) for line in lines)}
    for folder, kind, limit, use in _GROUPS:
        group = pathlib.PurePath(own.get(kind, "/").lstrip("/"))
        # A container sees its own group as the root, and none by its name.
        for place in (root / folder / part for part in (group, *group.parents)):
            most, used = _text(place / limit).strip(), _text(place / use).strip()
            if most.isdecimal() and used.isdecimal():
                stat = _numbers(place / "memory.stat")
                cached = max(stat.get(name, 0) for name in _CACHED)
                yield max(0, int(most) - int(used) + cached)


def _numbers(path: pathlib.Path) -> dict[str, int]:
    """Reads lines of a name and a number."""
    lines = (line.split() for line in _text(path).splitlines())
    return {parts[0]: int(parts[1]) for parts in lines if len(parts) > 1}


def _text(path: pathlib.Path) -> str:
    """Reads a file; "" if there is none."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""

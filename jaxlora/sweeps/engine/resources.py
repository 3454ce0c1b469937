"""What the host of a group reports about its memory and processors."""

import os
import pathlib

_MEMINFO = pathlib.Path("/proc/meminfo")


def host_resources() -> dict[str, float]:
    """Returns the load per processor, and the share of the memory that is in use."""
    found = {"load": os.getloadavg()[0] / (os.cpu_count() or 1)}
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return found
    kib = {name: int(rest.split()[0]) for name, _, rest in map(_parts, lines)}
    if {"MemTotal", "MemAvailable"} <= kib.keys():
        found["memory"] = 1 - kib["MemAvailable"] / kib["MemTotal"]
    return found


def _parts(line: str) -> tuple[str, str, str]:
    return line.partition(":")

"""The folder in which compiled programs outlast a session of tests."""

import hashlib
import os
import pathlib
import shutil

_MAX_BYTES = 2 << 30
_CPU_INFO = pathlib.Path("/proc/cpuinfo")


def compiled_programs() -> pathlib.Path:
    """Returns the folder; it is emptied first where it has become too large.

    JAX's key of a program holds all but the kind of processor that it is compiled for.
    """
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(home) / "jaxlora-tests" / _processor()
    files = folder.glob("*") if "PYTEST_XDIST_WORKER" not in os.environ else ()
    if sum(file.stat().st_size for file in files) > _MAX_BYTES:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _processor() -> str:
    """Identifies the kind of processor by its name and instruction sets."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    kind = sorted({li for li in lines if li.startswith(("model name", "flags"))})
    return hashlib.sha256("\n".join(kind).encode()).hexdigest()[:16]

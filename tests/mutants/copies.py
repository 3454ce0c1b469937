"""Copies of this checkout with a mistake in the code."""

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

from tests.mutants.table import Mutant

ROOT = pathlib.Path(__file__).parents[2]
_PRODUCT = "jaxlora", "pallas_kernels", "scheduler", "sharding"
_NOT_COPIED = shutil.ignore_patterns(".?*", "build", "*.egg-info")


def sources(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the files of the product's code."""
    for name in _PRODUCT:
        for folder, folders, names in os.walk(root / name):  # follows no links
            folders.sort()
            yield from (
                pathlib.Path(folder, own) for own in sorted(names) if own[-3:] == ".py"
            )


def make_copy(folder: pathlib.Path) -> pathlib.Path:
    """Copies the checkout to a new folder; times stay, and so does compiled code."""
    return shutil.copytree(ROOT, folder, symlinks=True, ignore=_NOT_COPIED)


def run_with(mutant: Mutant, copy: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Runs a mutant's tests in a copy until one fails; the copy is whole afterwards."""
    (path,) = (path for path in sources(copy) if mutant.old in path.read_text())
    whole, times = path.read_text(), path.stat()
    path.write_text(whole.replace(mutant.old, mutant.new))
    try:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", *mutant.tests],
            cwd=copy,
            # Some need the devices that a CPU simulates.
            env=os.environ | {"PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    finally:
        path.write_text(whole)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

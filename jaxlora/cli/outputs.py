"""Checks that a command does not replace a file that it reads."""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator

from jaxlora.errors import StorageError


def check_output(
    path: str | os.PathLike, inputs: Iterable[str | os.PathLike | None]
) -> None:
    """Checks that writing a file would replace no file that is read.

    Args:
        path: The file to write, which need not exist.
        inputs: The files that are read, and folders of such files. None, and what does
            not exist, such as a name on a hub, is skipped.

    Raises:
        StorageError: The file is one of them, by any name or link; or it is a folder,
            a device or a pipe.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # nothing is there, or writing it will say why not
        return
    if not stat.S_ISREG(found.st_mode):
        raise StorageError(
            f"{path} exists and is not a regular file, so it is not replaced. Choose "
            "another path."
        )
    for given in filter(None, inputs):
        if any(os.path.samestat(found, other) for other in _file_stats(given)):
            raise StorageError(
                f"{path} would be replaced, and it is read as {given}. Choose another "
                "path."
            )


def _file_stats(path: str | os.PathLike) -> Iterator[os.stat_result]:
    """Yields the status of a file, or of all files in a folder."""
    names = [os.path.join(at, name) for at, _, files in os.walk(path) for name in files]
    for name in (path, *names):
        with contextlib.suppress(OSError, ValueError):
            yield os.stat(name)

"""The folder for files that a later run can use again, and that may be removed."""

import errno
import os
import pathlib
import stat


def cache_home() -> pathlib.Path:
    """Returns $XDG_CACHE_HOME/jaxlora, or ~/.cache/jaxlora if that is not set.

    Raises:
        RuntimeError: There is no home folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    home = pathlib.Path(cache) if cache else pathlib.Path.home() / ".cache"
    return home / "jaxlora"


def make_private(folder: pathlib.Path) -> None:
    """Makes a folder for this user alone, or checks the one that is there.

    Raises:
        OSError: It cannot be made, or others may write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder.stat(), folder)


def check_private(found: os.stat_result, path: pathlib.Path) -> None:
    """Checks that only this user may have written a file or folder.

    Args:
        found: Its status.
        path: Its path, for the error.

    Raises:
        OSError: It belongs to another user, or others may write to it.
    """
    if found.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}")
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        why = f"other users may write to it (mode {mode:o}). If it is yours"
        raise OSError(errno.EPERM, f"{why}, run: chmod go-w {path}")

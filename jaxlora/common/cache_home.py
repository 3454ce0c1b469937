"""The user's cache: files that a later run can use again, and that may be removed.

Only files that nobody but this user may have written are read.
"""

import errno
import logging
import os
import pathlib
import re
import stat
from collections.abc import Callable
from typing import BinaryIO

import pydantic

from jaxlora.common.json_file import cut, open_regular_file

logger = logging.getLogger(__name__)

_MOST_BYTES = 2**20  # of a device's file


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


def open_private(path: pathlib.Path) -> BinaryIO:
    """Opens a file to read its bytes, if only this user may have written it.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It is no regular file, or others may write to it or its folder.
    """
    check_private(path.parent.stat(), path.parent)
    # A link may lead to a file that somebody else chooses.
    file = open_regular_file(path, follow=False)
    try:
        check_private(os.fstat(file.fileno()), path)
    except OSError:
        file.close()
        raise
    return file


def remove_oldest(
    folder: pathlib.Path,
    suffix: str,
    max_bytes: int,
    keep: pathlib.Path | None = None,
) -> None:
    """Removes the files used least recently, until the rest is small enough.

    Args:
        folder: The folder.
        suffix: End of the names of its files.
        max_bytes: Bound on the size of all.
        keep: A file that stays, whatever its size.
    """
    entries = []
    for path in folder.glob(f"*{suffix}"):
        try:
            found = path.lstat()
        except FileNotFoundError:  # another process has removed it
            continue
        if stat.S_ISREG(found.st_mode):
            entries.append((found.st_mtime_ns, found.st_size, path))
    excess = sum(size for _, size, _ in entries) - max_bytes
    for _, size, path in sorted(entries):
        if excess <= 0:
            return
        if path != keep:
            path.unlink(missing_ok=True)
            excess -= size


# ---- files of a kind of device -------------------------------------------------------


def device_path(folder: str, device_kind: str) -> pathlib.Path:
    """Returns the path of a device's file in a folder of the user's cache.

    Raises:
        RuntimeError: There is no home folder.
    """
    return cache_home() / folder / file_name(device_kind)


def file_name(device_kind: str) -> str:
    """Returns the name of a device's file."""
    name = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-") or "unnamed"
    return f"{name}.json"


class DeviceFile(pydantic.BaseModel):
    """The content of a file.

    Attributes:
        device: JAX's name of the device.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    device: str


def validated[F: DeviceFile](kind: type[F], text: str, device_kind: str) -> F:
    """Returns the content of the text of a file.

    Raises:
        ValueError: The text is not of this kind, or of another device.
    """
    try:
        found = kind.model_validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}") from error
    if found.device != device_kind:
        raise ValueError(f"it is of the device {found.device!r:.80}")
    return found


def read_private[T](
    folder: str, device_kind: str, parse: Callable[[str], T]
) -> T | None:
    """Reads a device's file; None, with a line in the log, if it cannot be used.

    Only a file of this user, in a folder of this user, is read.

    Args:
        folder: The folder of the user's cache.
        device_kind: JAX's name of the device.
        parse: Returns what its text holds; raises ValueError if it is damaged.
    """
    try:
        path = device_path(folder, device_kind)
    except RuntimeError:
        return None
    try:
        with open_private(path) as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        return parse(data.decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or cut(error)
        logger.warning("%s: %s is not used: %s", folder, path, why)
        return None

"""Parses untrusted JSON, within the limits of Python's stack and integers."""

import errno
import json
import os
import pathlib
import reprlib
import stat
from typing import Any, BinaryIO

# Maximum nesting depth. It is far more than in any real file, and far less than the
# depth that exhausts the stack when the value is printed or written.
_MAX_DEPTH = 100
_NOT_REGULAR = "it is not a regular file"

_repr = reprlib.Repr(maxdict=6, maxlist=8, maxtuple=8, maxset=8, maxlevel=3)
_repr.maxstring = _repr.maxother = 200
_repr.maxlong = 60


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text.

    Raises:
        ValueError: The text is not JSON, nests too deep, or holds a number that is too
            long.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it nests deeper than {_MAX_DEPTH} levels") from None
    if _is_deep(value):
        raise ValueError(f"it nests deeper than {_MAX_DEPTH} levels")
    return value


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_DEPTH):
        children = (v.values() if isinstance(v, dict) else v for v in level)
        level = [c for v in children for c in v if isinstance(c, dict | list)]
    return bool(level)


def read_json_file(path: pathlib.Path) -> Any:
    """Reads the value in a JSON file.

    Raises:
        FileNotFoundError: `path` does not exist.
        OSError: The file cannot be read, or is a dangling link.
        ValueError: The file is not JSON in UTF-8, nests too deep, or holds a number
            that is too long.
    """
    try:
        check_regular_file(path)
        return parse_json(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        if os.path.islink(path):
            where = os.readlink(path)
            raise OSError(f"it links to {where}, which is missing") from None
        raise


def check_regular_file(path: pathlib.Path) -> None:
    """Raises OSError unless a path is a regular file (and not, say, a pipe)."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(_NOT_REGULAR)


def open_regular_file(path: pathlib.Path, *, follow: bool = True) -> BinaryIO:
    """Opens a file to read its bytes; never waits for the writer of a pipe.

    Args:
        path: The file.
        follow: Whether it may be a symbolic link to a file.

    Raises:
        FileNotFoundError: `path` does not exist.
        OSError: `path` is not a regular file, or cannot be read.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_regular(path)
    return os.fdopen(handle, "rb")


def read_regular_file(
    path: pathlib.Path, *, follow: bool = True, limit: int = -1
) -> bytes:
    """Reads a file, or its first `limit` bytes; see `open_regular_file`."""
    with open_regular_file(path, follow=follow) as file:
        return file.read(limit)


def _not_regular(path: pathlib.Path) -> OSError:
    return OSError(errno.EINVAL, _NOT_REGULAR, str(path))


def shown(value: object) -> str:
    """Returns the `repr` of a value from a file, shortened if it is long."""
    try:
        return _repr.repr(value)
    except ValueError:  # Python refuses to print integers with thousands of digits
        return f"a number of {type(value).__name__} too long to print"


def cut(error: BaseException, most: int = 300) -> str:
    """Shortens the text of a library's error, which may quote the whole file."""
    text = str(error)
    return text if len(text) <= most else f"{text[:most]}..."

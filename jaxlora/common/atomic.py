"""Atomic writes: a file or folder is on disk completely or not at all."""

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import pathlib
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from typing import IO

import safetensors

from jaxlora.common.json_file import read_regular_file
from jaxlora.errors import StorageError

logger = logging.getLogger(__name__)

# Name of the temporary folder for a path that is being written. It also holds the file
# _MARK. Only folders with that file are removed: a name alone proves nothing.
_SUFFIX = ".jaxlora-tmp"
_TEMPORARY = re.compile(rf"\.(.+)\.[0-9a-f]{{8}}{re.escape(_SUFFIX)}")
_MARK, _MARK_TEXT = "jaxlora.txt", "jaxlora is writing this folder, and removes it.\n"
# The temporary folder's subfolders for the new contents and the contents they replace.
_NEW, _OLD = "new", "old"
# Some file systems cannot sync folders, but then do not need it either.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
# A folder cannot be renamed to a name that a folder with contents has.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a text file so that readers see either the old or the new text.

    Raises:
        StorageError: The file cannot be written; the old file is unchanged.
    """
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike, data: bytes, *, mode: int = 0o666) -> None:
    """Writes a file of bytes in the same way as `write_text`.

    Args:
        path: The file.
        data: Its contents.
        mode: Its permissions, from which the kernel removes the umask.
    """
    with new_file(path, mode=mode) as file:
        file.write(data)


@contextlib.contextmanager
def new_file(path: str | os.PathLike, *, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yields a file that replaces `path` when the block ends without an error.

    Args:
        path: The file.
        mode: Its permissions, from which the kernel removes the umask.

    Raises:
        StorageError: The file cannot be written; the old file is unchanged.
    """
    path = pathlib.Path(path)
    with _temporary(path) as place:
        handle = os.open(place / _NEW, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(place / _NEW, path)


@contextlib.contextmanager
def new_path(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a path to make a file at, which replaces `path` as with `new_file`.

    It is for libraries that make files by themselves, such as safetensors. The file
    gets the usual permissions of a new one.

    Raises:
        StorageError: The file cannot be written; the old file is unchanged.
    """
    path = pathlib.Path(path)
    with _temporary(path) as place:
        yield place / _NEW
        (place / _NEW).chmod(place.stat().st_mode & 0o666)
        with (place / _NEW).open("rb") as file:
            os.fsync(file.fileno())
        os.replace(place / _NEW, path)


@contextlib.contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a folder that gets the name `path` when the block ends without an error.

    Raises:
        FileExistsError: `path` exists already, or is made by another process meanwhile.
        StorageError: The folder cannot be written.
    """
    path = pathlib.Path(path)
    is_plain = path.is_dir() and not path.is_symlink()
    if os.path.lexists(path) and not (is_plain and not any(path.iterdir())):
        raise _exists(path)
    with _temporary(path) as place:
        folder = place / _NEW
        folder.mkdir()
        yield folder
        try:
            folder.rename(path)  # takes the place of an empty folder
        except OSError as error:
            if error.errno not in (*_TAKEN, errno.ENOTDIR):
                raise
            raise _exists(path) from None


def _exists(path: pathlib.Path) -> FileExistsError:
    return FileExistsError(f"{path} exists already. Remove it, or choose another name.")


@contextlib.contextmanager
def replace_folder(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a folder that replaces `path` when the block ends without an error.

    Until then the old folder stays complete. A kill between the two renames leaves the
    old folder in a temporary folder; the next call puts it back. If several processes
    replace a folder at the same time, each does it completely, and the last one stays.

    Raises:
        StorageError: There is a file or a symbolic link at `path`, or the folder
            cannot be written.
    """
    path = pathlib.Path(path)
    check_no_file(path)
    with wrap_os_errors(path):
        for left in _temporaries_of(path):
            if not _is_in_use(left):
                _discard(left)
    with _temporary(path) as place:
        folder = place / _NEW
        folder.mkdir()
        yield folder
        _exchange(folder, path)


def _exchange(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Renames a folder to `path`, after what is there has been moved beside it."""
    for number in itertools.count():
        check_no_file(path)
        with contextlib.suppress(FileNotFoundError):
            path.rename(folder.with_name(f"{_OLD}{number}"))
        try:
            folder.rename(path)
            return
        except OSError as error:
            # Another process has put its folder there between the two renames.
            if error.errno not in _TAKEN:
                raise


def check_no_file(path: pathlib.Path) -> None:
    """Checks that a folder can be written to a path.

    A file there would be lost, and a symbolic link would be followed.

    Raises:
        StorageError: There is a file or a symbolic link at `path`.
    """
    # One look: another process may move a folder away between two.
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return  # a file in the place of a parent fails where the folder is made
    if not stat.S_ISDIR(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "a file"
        raise StorageError(
            f"{path} is {kind}, so a folder cannot be written there. Move it away, or "
            "choose another path."
        )


def find_complete_folder(path: pathlib.Path) -> pathlib.Path:
    """Returns the path of the complete folder, even if its replacement was killed."""
    if not path.exists():
        for place in _temporaries_of(path):
            for old in place.glob(f"{_OLD}*"):
                return old
    return path


def remove_leftovers(folder: pathlib.Path, *, alone: bool = False) -> None:
    """Removes what killed processes left incomplete in a folder.

    Folders whose replacement was killed between its two renames are put back.

    Args:
        folder: The folder; it need not exist. Its subfolders are not searched.
        alone: Whether no other process writes to this folder. Otherwise the temporary
            folders of live processes are kept, and on a file system without locks all
            of them.
    """
    for place in _temporaries(folder):
        if alone or not _is_in_use(place):
            _discard(place)


def _temporaries(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the temporary folders in a folder, which need not exist."""
    if not folder.is_dir():
        return []
    return [
        path
        for path in folder.iterdir()
        if _TEMPORARY.fullmatch(path.name) and _is_marked(path)
    ]


def _temporaries_of(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the temporary folders of what is to be written to a path."""
    return [place for place in _temporaries(path.parent) if _target(place) == path]


def _target(place: pathlib.Path) -> pathlib.Path:
    match = _TEMPORARY.fullmatch(place.name)
    assert match is not None
    return place.with_name(match[1])


def _is_marked(place: pathlib.Path) -> bool:
    """Whether this program made a folder to write to."""
    try:
        if not stat.S_ISDIR(place.lstat().st_mode):
            return False
        return read_regular_file(place / _MARK, follow=False) == _MARK_TEXT.encode()
    except OSError:
        return False


def _discard(place: pathlib.Path) -> None:
    """Removes a temporary folder; what it has replaced goes back if nothing did."""
    path = _target(place)
    try:
        for old in place.glob(f"{_OLD}*"):
            if not os.path.lexists(path):
                old.rename(path)
                sync_folder(path.parent)
        # The mark goes last, so that a kill leaves nothing that is not removed later.
        for child in place.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            elif child.name != _MARK:
                child.unlink()
        (place / _MARK).unlink(missing_ok=True)
        place.rmdir()
    except OSError as error:
        logger.warning("%s cannot be removed: %s", place, error.strerror or error)


def _is_in_use(path: pathlib.Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return True
    try:
        return not _try_lock(handle)
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    """Locks an open file or folder until it is closed; False if another holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        return False
    return True


@contextlib.contextmanager
def _temporary(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary folder beside a path, and syncs what was renamed from it."""
    with wrap_os_errors(path):
        make_folder(path.parent)
        place = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_SUFFIX}")
        place.mkdir()
        handle = -1
        try:
            handle = os.open(place, os.O_RDONLY)
            _try_lock(handle)
            (place / _MARK).write_text(_MARK_TEXT, encoding="utf-8")
            yield place
            sync_folder(path.parent)
        finally:
            _discard(place)
            if handle >= 0:
                os.close(handle)


def make_folder(folder: pathlib.Path) -> None:
    """Makes a folder and its missing parents, and syncs their names to the disk."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        sync_folder(new.parent)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def sync_files(folder: pathlib.Path) -> None:
    """Syncs a new folder and the files directly in it to the disk.

    It also gives the files the usual permissions of a new file, because safetensors
    writes files that only their owner can read.
    """
    mode = folder.stat().st_mode & 0o666
    for file in folder.iterdir():
        file.chmod(mode)
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    sync_folder(folder)


def sync_folder(folder: pathlib.Path) -> None:
    """Syncs the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def wrap_os_errors(path: pathlib.Path) -> Iterator[None]:
    """Converts the system's errors on writing `path` to `StorageError`."""
    try:
        yield
    except (StorageError, FileExistsError):
        raise
    except (OSError, safetensors.SafetensorError) as error:
        number = _os_number(error)
        if number is None or _is_elsewhere(error, path):
            raise
        raise StorageError(
            f"{path} cannot be written: {os.strerror(number)}. Its previous contents "
            "are unchanged. Free space or fix the permissions, then try again."
        ) from error


def _is_elsewhere(error: Exception, path: pathlib.Path) -> bool:
    """Whether an error concerns another file, such as the source of a copy."""
    file = getattr(error, "filename", None)
    if not isinstance(file, str | bytes):
        return False
    about = pathlib.Path(os.fsdecode(file)).absolute()
    is_temporary = any(_TEMPORARY.fullmatch(part) for part in about.parts)
    path = path.absolute()
    return not is_temporary and about not in (path, *path.parents)


def _os_number(error: Exception) -> int | None:
    """Returns the errno of an error, which safetensors only gives in the text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None

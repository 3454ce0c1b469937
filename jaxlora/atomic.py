"""Atomic writes: a file or folder is on disk completely or not at all."""

import contextlib
import errno
import fcntl
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Iterator
from typing import IO

import safetensors

from jaxlora.errors import StorageError

# Names of temporary files and folders end with this suffix, and no other names do.
_SUFFIX = ".jaxlora-tmp"
_LEFTOVER = re.compile(rf"\..+\.[0-9a-f]{{8}}{re.escape(_SUFFIX)}")
# Some file systems cannot sync folders, but then do not need it either.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


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
    with wrap_os_errors(path):
        make_folder(path.parent)
        temporary = _temporary_name(path)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                _try_lock(file.fileno())
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextlib.contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a folder that gets the name `path` when the block ends without an error.

    Raises:
        FileExistsError: `path` exists already.
        StorageError: The folder cannot be written.
    """
    path = pathlib.Path(path)
    is_plain = path.is_dir() and not path.is_symlink()
    if os.path.lexists(path) and not (is_plain and not any(path.iterdir())):
        raise FileExistsError(
            f"{path} exists already. Remove it, or choose another name."
        )
    with _temporary(path) as folder:
        yield folder
        if path.is_dir():
            path.rmdir()
        folder.rename(path)


@contextlib.contextmanager
def replace_folder(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a folder that replaces `path` when the block ends without an error.

    Until then the old folder stays complete. A kill between the two renames leaves the
    old folder under a name that ends in `.old`; the next call puts it back.

    Raises:
        StorageError: There is a file or a symbolic link at `path`, or the folder
            cannot be written.
    """
    path = pathlib.Path(path)
    check_no_file(path)
    old = _old_name(path)
    with wrap_os_errors(path):
        recover_folder(path)
    with _temporary(path) as folder:
        yield folder
        if path.exists():
            path.rename(old)
        folder.rename(path)
        shutil.rmtree(old, ignore_errors=True)


def check_no_file(path: pathlib.Path) -> None:
    """Checks that a folder can be written to a path.

    A file there would be lost, and a symbolic link would be followed.

    Raises:
        StorageError: There is a file or a symbolic link at `path`.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        kind = "a symbolic link" if path.is_symlink() else "a file"
        raise StorageError(
            f"{path} is {kind}, so a folder cannot be written there. Move it away, or "
            "choose another path."
        )


def recover_folder(path: pathlib.Path) -> None:
    """Completes a replacement that was killed between its two renames."""
    old = _old_name(path)
    if not old.is_dir():
        return
    if path.exists():
        shutil.rmtree(old)
    else:
        old.rename(path)
        sync_folder(path.parent)


def find_complete_folder(path: pathlib.Path) -> pathlib.Path:
    """Returns the path of the complete folder, even if its replacement was killed."""
    old = _old_name(path)
    return old if not path.exists() and old.is_dir() else path


def remove_leftovers(folder: pathlib.Path, *, alone: bool = False) -> None:
    """Removes incomplete files and folders that killed processes left in a folder.

    Args:
        folder: The folder; it need not exist. Its subfolders are not searched.
        alone: Whether no other process writes to this folder. Otherwise the temporary
            files of live processes are kept, and on a file system without locks all
            temporary files.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if not _LEFTOVER.fullmatch(path.name) or path.is_symlink():
            continue
        if not alone and _is_in_use(path):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


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
    with wrap_os_errors(path):
        make_folder(path.parent)
        folder = _temporary_name(path)
        folder.mkdir()
        handle = os.open(folder, os.O_RDONLY)
        try:
            _try_lock(handle)
            yield folder
            sync_folder(path.parent)
        finally:
            os.close(handle)
            shutil.rmtree(folder, ignore_errors=True)


def _temporary_name(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_SUFFIX}")


def _old_name(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}.old")


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
    is_temporary = any(_LEFTOVER.fullmatch(part) for part in about.parts)
    path = path.absolute()
    return not is_temporary and about not in (path, _old_name(path), *path.parents)


def _os_number(error: Exception) -> int | None:
    """Returns the errno of an error, which safetensors only gives in the text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None

"""Files and folders that are there whole, or not at all."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a file so that a reader sees the old text or the new, never a part."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """A folder that appears under `path` when the block ends well, and never before.

    Raises:
        FileExistsError: There is something at `path` already.
    """
    path = pathlib.Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
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
    """A folder that takes the place of `path` when the block ends well.

    Until then what is at `path` stays whole. A kill between the two renames leaves it
    under a name ending in `.old`; the next call puts it back.
    """
    path = pathlib.Path(path)
    old = path.with_name(f".{path.name}.old")
    if old.exists():
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)
    with _temporary(path) as folder:
        yield folder
        if path.exists():
            path.rename(old)
        folder.rename(path)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _temporary(path: pathlib.Path) -> Iterator[pathlib.Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    folder.chmod(0o777 & ~_umask())
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_files(folder: pathlib.Path) -> None:
    """Returns when the files directly in a folder are on the disk.

    Also gives them the permissions of any new file: safetensors writes files that only
    their owner can read.
    """
    for file in folder.iterdir():
        file.chmod(0o666 & ~_umask())
        with file.open("rb") as opened:
            os.fsync(opened.fileno())

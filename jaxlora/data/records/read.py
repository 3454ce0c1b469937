"""Reads a job's records from files, a saved dataset or the Hugging Face hub."""

import dataclasses
import functools
import glob
import hashlib
import itertools
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxlora.config import DataConfig
from jaxlora.data.records.files import (
    READERS,
    BadLineError,
    Record,
    os_errors,
    read_file,
)
from jaxlora.data.records.hub import Feed, open_hub, open_saved_dataset
from jaxlora.errors import DataError

_BLOCK_BYTES = 2**20
# Files of a folder that `datasets.save_to_disk` has written.
_MARKS = ("state.json", "dataset_dict.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records:
    """Records that can be read several times and are never all in memory.

    Attributes:
        path: Path or dataset id, as given by the user.
        read: Returns an iterator that starts at the first record.
        feed: Passes all stored bytes to a function, such as `update` of a hash.
        limit: Maximum number of records to read; None reads all.
    """

    path: str
    read: Callable[[], Iterator[Record | BadLineError]]
    feed: Callable[[Feed], None]
    limit: int | None

    def __iter__(self) -> Iterator[Record | BadLineError]:
        """Reads the records, in the order in which they are stored.

        With `data.bad_records: drop`, a line that cannot be read is its error.

        Raises:
            DataError: A record is damaged, the disk fails, or there is no record.
        """
        is_empty = True
        with os_errors(self.path):
            try:
                for record in itertools.islice(self.read(), self.limit):
                    is_empty = False
                    yield record
            except BadLineError as error:
                cure = "(data.bad_records: drop leaves out such records.)"
                raise DataError(f"{error} {cure}") from error
        if is_empty:
            raise DataError(
                f"{self.path}: holds no records. Give data with at least one."
            )

    def readable(self) -> Iterator[Record]:
        """Reads the records, without lines that cannot be read.

        Raises:
            DataError: As for all records, or none can be read.
        """
        first: BadLineError | None = None
        is_empty = True
        for record in self:
            if isinstance(record, BadLineError):
                first = first or record
                continue
            is_empty = False
            yield record
        if is_empty and first is not None:
            raise DataError(f"none of the lines can be read. The first: {first}")

    def content_hash(self) -> str:
        """Hashes the stored bytes, from which the records are read.

        Raises:
            DataError: They cannot be read.
        """
        digest = hashlib.sha256()
        with os_errors(self.path):
            self.feed(digest.update)
        return digest.hexdigest()


def open_records(data: DataConfig) -> Records:
    """Finds the records of `data`.

    A path that exists is read as a file (by its suffix), as a folder written by
    `datasets.save_to_disk`, or as a folder of files, one after another. So are the
    files of a glob. Any other path is a dataset id on the hub.

    Args:
        data: Where the records are; `limit` stops the reading early.

    Raises:
        DataError: The data is missing, damaged or of an unknown form.
    """
    files = find_files(data)
    if not files:
        read, feed = open_hub(data)
    elif files[0].is_dir():
        read, feed = open_saved_dataset(files[0], data)
    else:
        keeps_bad = data.bad_records == "drop"
        read = functools.partial(_read_files, files, keeps_bad=keeps_bad)
        feed = functools.partial(_feed_files, files)
    return Records(path=data.path, read=read, feed=feed, limit=data.limit)


def find_files(data: DataConfig) -> list[Path]:
    """Returns the files of records by name, or the folder of a saved dataset.

    There are none if the path is a dataset id on the hub, which is not looked up.

    Raises:
        DataError: There is nothing of the kind that the path names, or not in a form
            that can be read.
    """
    path, mode = _find(data.path)
    if stat.S_ISREG(mode):
        found = [path]
    elif stat.S_ISDIR(mode):
        if any((path / mark).is_file() for mark in _MARKS):
            rule = "is for datasets on the hub, and this is a saved folder"
            _refuse(data, ("subset", "revision"), rule)
            return [path]
        with os_errors(data.path):
            found = [p for p in path.rglob("[!.]*") if p.is_file()]
    elif mode:
        raise DataError(f"{data.path}: is neither a file nor a folder. Name one.")
    elif glob.has_magic(data.path):
        with os_errors(data.path):
            names = glob.glob(str(path), recursive=True)
        found = [p for p in map(Path, names) if p.is_file()]
    elif path.suffix in READERS or _is_no_hub_id(data.path):
        raise DataError(
            f"{data.path}: no such file or folder (looked in {Path.cwd()}). Correct "
            "data.path, or give a dataset id such as 'owner/name'."
        )
    else:
        return []
    _check_files(found, data)
    return sorted(found)


def _check_files(files: Sequence[Path], data: DataConfig) -> None:
    if not files:
        raise DataError(
            f"{data.path}: no files of records (looked in {Path.cwd()}). Name a folder "
            f"with {' or '.join(_MARKS)}, which datasets.save_to_disk writes, a folder "
            "of files of records, or a glob such as 'data/*.jsonl'."
        )
    for path in files:
        if path.name in _MARKS:
            raise DataError(
                f"{data.path}: is no folder that datasets.save_to_disk has written, "
                f"and {path.parent} is one. Name that."
            )
    suffixes = sorted({path.suffix for path in files})
    if len(suffixes) > 1:
        raise DataError(
            f"{data.path}: holds files of several kinds ({', '.join(suffixes)}). Name "
            f"those that hold the records by a glob, such as '*{suffixes[-1]}'."
        )
    if suffixes[0] not in READERS:
        raise DataError(
            f"{data.path}: unknown suffix {suffixes[0]!r}. Convert the file to one of: "
            f"{', '.join(READERS)}."
        )
    rule = "is for Hugging Face datasets, and these are files"
    _refuse(data, ("split", "subset", "revision"), rule)


def _find(name: str) -> tuple[Path, int]:
    """Returns the path and its file type from `stat`, 0 if nothing exists there."""
    path = Path(name)
    try:
        path = path.expanduser()
        with os_errors(str(path)):
            return path, path.stat().st_mode if name else 0
    except DataError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return path, 0
        raise
    # The user in ~user is unknown, or the name holds a NUL or a lone surrogate.
    except (RuntimeError, ValueError) as error:
        raise DataError(
            f"data.path {name!r:.200} cannot be a path: {error}. Correct it."
        ) from error


def _is_no_hub_id(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or path == ""


def _refuse(data: DataConfig, keys: tuple[str, ...], rule: str) -> None:
    for key in keys:
        value = getattr(data, key)
        if value is not None:
            raise DataError(f"{data.path}: {key}={value!r} {rule}. Remove data.{key}.")


def _read_files(
    files: Sequence[Path], *, keeps_bad: bool
) -> Iterator[Record | BadLineError]:
    for path in files:
        yield from read_file(path, keeps_bad=keeps_bad)


def _feed_files(files: Sequence[Path], feed: Feed) -> None:
    for path in files:
        if len(files) > 1:  # where a file ends counts, too
            feed(f"{path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                feed(block)

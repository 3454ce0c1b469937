"""Reads a job's records from a file, a saved dataset or the Hugging Face hub."""

import dataclasses
import functools
import hashlib
import itertools
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlora.config import DataConfig
from jaxlora.data.records.files import (
    READERS,
    BadLineError,
    Record,
    os_errors,
    read_file,
)
from jaxlora.data.records.hub import Feed, Source, open_hub, open_saved_dataset
from jaxlora.data.records.shards import check_shards_found, open_shards, read_shards
from jaxlora.errors import DataError

_BLOCK_BYTES = 2**20


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

    A path that exists is read as a file (by its suffix) or as a folder written by
    `datasets.save_to_disk`; any other path is a dataset id on the hub. With
    `streaming`, they are the records of its shards, one shard after another.

    Args:
        data: Where the records are; `limit` stops the reading early.

    Raises:
        DataError: The data is missing, damaged or of an unknown form.
    """
    check_found(data)
    if data.streaming:
        read, feed = read_shards(open_shards(data), data.limit)
        return Records(path=data.path, read=read, feed=feed, limit=data.limit)
    path, mode = _find(data.path)
    if stat.S_ISREG(mode):
        read, feed = _open_file(path, data)
    elif stat.S_ISDIR(mode):
        read, feed = open_saved_dataset(path, data)
    else:
        read, feed = open_hub(data)
    return Records(path=data.path, read=read, feed=feed, limit=data.limit)


def check_found(data: DataConfig) -> None:
    """Checks that the records exist, in a form that can be read; reads none.

    Raises:
        DataError: They do not. Ids on the hub are not looked up.
    """
    if data.streaming:
        check_shards_found(data)
        return
    path, mode = _find(data.path)
    if stat.S_ISREG(mode):
        _check_file(path, data)
    elif stat.S_ISDIR(mode):
        _check_saved_dataset(path, data)
    elif mode:
        raise DataError(f"{data.path}: is neither a file nor a folder. Name one.")
    elif path.suffix in READERS or _is_no_hub_id(data.path):
        raise DataError(
            f"{data.path}: no such file or folder (looked in {Path.cwd()}). Correct "
            "data.path, or give a dataset id such as 'owner/name'."
        )


def _find(name: str) -> tuple[Path, int]:
    """Returns the path and its file type from `stat`, 0 if nothing exists there."""
    try:
        path = Path(name).expanduser()
        return path, _mode(path) if name else 0
    # The user in ~user is unknown, or the name holds a NUL or a lone surrogate.
    except (RuntimeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"data.path {name!r:.200} cannot be a path: {error}. Correct it."
        ) from error


def _mode(path: Path) -> int:
    try:
        with os_errors(str(path)):
            return path.stat().st_mode
    except DataError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return 0
        raise


def _is_no_hub_id(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or path == ""


def _refuse(data: DataConfig, keys: tuple[str, ...], rule: str) -> None:
    for key in keys:
        value = getattr(data, key)
        if value is not None:
            raise DataError(f"{data.path}: {key}={value!r} {rule}. Remove data.{key}.")


def _check_file(path: Path, data: DataConfig) -> None:
    if path.suffix not in READERS:
        raise DataError(
            f"{data.path}: unknown suffix {path.suffix!r}. Convert the file to one of: "
            f"{', '.join(READERS)}."
        )
    rule = "is for Hugging Face datasets, and this is one file"
    _refuse(data, ("split", "subset", "revision"), rule)


def _open_file(path: Path, data: DataConfig) -> Source:
    keeps_bad = data.bad_records == "drop"
    read = functools.partial(read_file, path, keeps_bad=keeps_bad)
    return read, functools.partial(_feed_file, path)


def _feed_file(path: Path, feed: Feed) -> None:
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            feed(block)


def _check_saved_dataset(path: Path, data: DataConfig) -> None:
    marks = ("state.json", "dataset_dict.json")
    if not any((path / mark).is_file() for mark in marks):
        raise DataError(
            f"{data.path}: is a folder without {' or '.join(marks)}, so it was not "
            "written by datasets.save_to_disk. Name a file in it instead, or set "
            "data.streaming for a folder of shards."
        )
    rule = "is for datasets on the hub, and this is a saved folder"
    _refuse(data, ("subset", "revision"), rule)

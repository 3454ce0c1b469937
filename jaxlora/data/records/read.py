"""Reads a job's records from a file, a saved dataset or the Hugging Face hub."""

import contextlib
import dataclasses
import hashlib
import io
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from jaxlora.config import DataConfig
from jaxlora.data.records.files import READERS, Record, arrow_rows
from jaxlora.errors import DataError

_DATASET_ROWS = 128
_HASHED_ROWS = 1000
_BLOCK_BYTES = 2**20

_Feed = Callable[[bytes], object]
# Functions that read the records, and that pass all stored bytes to a function.
_Source = tuple[Callable[[], Iterator[Record]], Callable[[_Feed], None]]


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
    read: Callable[[], Iterator[Record]]
    feed: Callable[[_Feed], None]
    limit: int | None

    def __iter__(self) -> Iterator[Record]:
        """Reads the records, in the order in which they are stored.

        Raises:
            DataError: A record is damaged, the disk fails, or there is no record.
        """
        is_empty = True
        with _os_errors(self.path):
            for record in itertools.islice(self.read(), self.limit):
                is_empty = False
                yield record
        if is_empty:
            raise DataError(
                f"{self.path}: holds no records. Give data with at least one."
            )

    def content_hash(self) -> str:
        """Hashes the stored bytes, from which the records are read.

        Raises:
            DataError: They cannot be read.
        """
        digest = hashlib.sha256()
        with _os_errors(self.path):
            self.feed(digest.update)
        return digest.hexdigest()


def open_records(data: DataConfig) -> Records:
    """Finds the records of `data`.

    A path that exists is read as a file (by its suffix) or as a folder written by
    `datasets.save_to_disk`; any other path is a dataset id on the hub.

    Args:
        data: Where the records are; `limit` stops the reading early.

    Raises:
        DataError: The data is missing, damaged or of an unknown form.
    """
    check_found(data)
    path, mode = _find(data.path)
    if stat.S_ISREG(mode):
        read, feed = _open_file(path)
    elif stat.S_ISDIR(mode):
        read, feed = _open_saved_dataset(path, data)
    else:
        read, feed = _open_hub(data)
    return Records(path=data.path, read=read, feed=feed, limit=data.limit)


def check_found(data: DataConfig) -> None:
    """Checks that the records exist, in a form that can be read; reads none.

    Raises:
        DataError: They do not. Ids on the hub are not looked up.
    """
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


@contextlib.contextmanager
def _os_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror or error}. Check the path, its "
            "permissions, and the disk."
        ) from error


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
        with _os_errors(str(path)):
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


def _open_file(path: Path) -> _Source:
    return lambda: READERS[path.suffix](path), lambda feed: _feed_file(path, feed)


def _feed_file(path: Path, feed: _Feed) -> None:
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            feed(block)


def _import_datasets(path: str):
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path}: Hugging Face datasets need the package `datasets`, which cannot "
            f"be imported ({error}). Install it: pip install 'jaxlora[datasets]'."
        ) from error
    return datasets


def _check_saved_dataset(path: Path, data: DataConfig) -> None:
    marks = ("state.json", "dataset_dict.json")
    if not any((path / mark).is_file() for mark in marks):
        raise DataError(
            f"{data.path}: is a folder without {' or '.join(marks)}, so it was not "
            "written by datasets.save_to_disk. Name a file in it instead."
        )
    rule = "is for datasets on the hub, and this is a saved folder"
    _refuse(data, ("subset", "revision"), rule)


def _open_saved_dataset(path: Path, data: DataConfig) -> _Source:
    datasets = _import_datasets(data.path)
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(
            f"{data.path}: datasets cannot load this folder ({error}). Write it again "
            "with save_to_disk."
        ) from error
    if not isinstance(loaded, dict) and data.split is not None:
        raise DataError(
            f"{data.path}: split={data.split!r}, but this is a single dataset without "
            "splits. Remove data.split."
        )
    return _open_dataset(_choose_split(loaded, data), data)


def _open_hub(data: DataConfig) -> _Source:
    datasets = _import_datasets(data.path)
    options: dict[str, Any] = {"split": data.split}
    if data.revision is not None:
        options["revision"] = data.revision
    try:
        loaded = datasets.load_dataset(data.path, data.subset, **options)
    # The library's own message explains its errors best: no network, an unknown id,
    # split or subset, or a damaged file.
    except Exception as error:
        hint = ""
        if any(os.environ.get(k) for k in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")):
            hint = " Offline mode is on (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set)."
        raise DataError(
            f"{data.path}: is not a local file or folder, and could not be loaded as a "
            f"dataset from the hub (revision={data.revision!r}, "
            f"subset={data.subset!r}, split={data.split!r}; "
            f"{type(error).__name__}: {error}).{hint} Correct data.path, "
            "data.revision, data.subset or data.split."
        ) from error
    if data.split is None:
        loaded = _choose_split(loaded, data)
    return _open_dataset(loaded, data)


def _choose_split(loaded, data: DataConfig):
    """Returns the dataset, or the split that `data.split` selects from several."""
    if not isinstance(loaded, dict):
        return loaded
    splits = list(loaded)
    if data.split is None and len(splits) == 1:
        return loaded[splits[0]]
    if data.split not in splits:
        given = (
            "no split is given" if data.split is None else f"no split {data.split!r}"
        )
        raise DataError(
            f"{data.path}: {given}. Set data.split to one of: {', '.join(splits)}."
        )
    return loaded[data.split]


def _open_dataset(dataset: Any, data: DataConfig) -> _Source:
    # In Arrow format, a dataset gives the stored values, without decoding images.
    tables = dataset.with_format("arrow")

    def read() -> Iterator[Record]:
        with _dataset_errors(data.path):
            for table in tables.iter(batch_size=_DATASET_ROWS):
                yield from arrow_rows(table, data.path)

    def feed_all(feed: _Feed) -> None:
        with _dataset_errors(data.path):
            for table in tables.iter(batch_size=_HASHED_ROWS):
                with pa.ipc.new_stream(_Sink(feed), table.schema) as stream:
                    stream.write_table(table)

    return read, feed_all


@contextlib.contextmanager
def _dataset_errors(path: str) -> Iterator[None]:
    """Converts whatever the package `datasets` raises to our error."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{path}: the dataset cannot be read ({type(error).__name__}: {error}). "
            "Fetch or save it again."
        ) from error


class _Sink(io.RawIOBase):
    """A file for pyarrow that passes what is written to a function."""

    def __init__(self, feed: _Feed):
        self._feed = feed

    def writable(self) -> bool:
        """Tells pyarrow that the file can be written to."""
        return True

    def write(self, data, /) -> int:
        """Passes bytes on."""
        self._feed(data)
        return memoryview(data).nbytes

"""Reads data sets by the package `datasets`: saved folders, and those of the hub."""

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from jaxlora.config import DataConfig
from jaxlora.data.records.files import BadLineError, Record, arrow_rows
from jaxlora.errors import DataError

_DATASET_ROWS = 128
_HASHED_ROWS = 1000

Feed = Callable[[bytes], object]
# Functions that read the records, and that pass all stored bytes to a function.
Source = tuple[Callable[[], Iterator[Record | BadLineError]], Callable[[Feed], None]]


def import_datasets(path: str) -> Any:
    """Imports the package `datasets`, which is an extra.

    Raises:
        DataError: It is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path}: Hugging Face datasets need the package `datasets`, which cannot "
            f"be imported ({error}). Install it: pip install 'jaxlora[datasets]'."
        ) from error
    return datasets


def open_saved_dataset(path: Path, data: DataConfig) -> Source:
    """Opens a folder that was written by `datasets.save_to_disk`."""
    datasets = import_datasets(data.path)
    # The package would wait for the writer of a pipe.
    for file in path.rglob("*"):
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise DataError(f"{file}: is neither a file nor a folder. Remove it.")
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        why = _without_folder(error, str(path))
        raise DataError(
            f"{data.path}: datasets cannot load this folder ({why}). Write it again "
            "with save_to_disk."
        ) from error
    if not isinstance(loaded, dict) and data.split is not None:
        raise DataError(
            f"{data.path}: split={data.split!r}, but this is a single dataset without "
            "splits. Remove data.split."
        )
    return _open_dataset(_choose_split(loaded, data), data)


def open_hub(data: DataConfig) -> Source:
    """Opens a data set of the hub, which `datasets` keeps on the disk.

    With `limit`, the first records are read without downloading the others, so that a
    set may be larger than the disk; all by one commit. Offline, and for a part of a
    split such as `train[:10%]`, which needs the length of the split, they come from
    what is on the disk.
    """
    if data.limit is None or "[" in (data.split or "") or _is_offline():
        return _open_dataset(_load_hub(data), data)
    commit = _find_commit(data)
    dataset = _load_hub(data, streaming=True, revision=commit)

    def feed_commit(feed: Feed) -> None:
        feed(commit.encode())

    return lambda: read_rows(dataset, data.path), feed_commit


def _load_hub(data: DataConfig, **more: Any) -> Any:
    """Loads the split of a data set of the hub that is used.

    Args:
        data: Names the data set.
        more: Further arguments of `datasets.load_dataset`.

    Raises:
        DataError: It cannot be loaded.
    """
    datasets = import_datasets(data.path)
    options: dict[str, Any] = {"split": data.split} | more
    if data.revision is not None:
        options.setdefault("revision", data.revision)
    try:
        loaded = datasets.load_dataset(data.path, data.subset, **options)
    # The library's own message explains its errors best: no network, an unknown id,
    # split or subset, or a damaged file.
    except Exception as error:
        raise _no_dataset(data, error) from error
    return loaded if data.split is not None else _choose_split(loaded, data)


def _find_commit(data: DataConfig) -> str:
    """Returns the commit of a data set on the hub that is current, or asked for.

    Raises:
        DataError: It cannot be found.
    """
    import_datasets(data.path)
    import huggingface_hub

    try:
        info = huggingface_hub.HfApi().dataset_info(data.path, revision=data.revision)
    except Exception as error:
        raise _no_dataset(data, error) from error
    return str(info.sha)


def _is_offline() -> bool:
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(os.environ.get(name) for name in names)


def _no_dataset(data: DataConfig, error: Exception) -> DataError:
    hint = ""
    if _is_offline():
        hint = " Offline mode is on (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set)."
    return DataError(
        f"{data.path}: is not a local file or folder, and could not be loaded as a "
        f"dataset from the hub (revision={data.revision!r}, subset={data.subset!r}, "
        f"split={data.split!r}; {type(error).__name__}: {error}).{hint} Correct "
        "data.path, data.revision, data.subset or data.split."
    )


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


def _open_dataset(dataset: Any, data: DataConfig) -> Source:
    tables = dataset.with_format("arrow")

    def feed_all(feed: Feed) -> None:
        with dataset_errors(data.path):
            for table in tables.iter(batch_size=_HASHED_ROWS):
                with pa.ipc.new_stream(_Sink(feed), table.schema) as stream:
                    stream.write_table(table)

    return lambda: read_rows(dataset, data.path), feed_all


@contextlib.contextmanager
def dataset_errors(path: str) -> Iterator[None]:
    """Converts whatever the package `datasets` raises to our error."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {_without_folder(error, path)}"
        raise DataError(
            f"{path}: the dataset cannot be read ({why}). Fetch or save it again."
        ) from error


def _without_folder(error: Exception, folder: str) -> str:
    """Returns the text of an error with paths in a folder relative to it."""
    text = str(error).replace(f"{folder}{os.sep}", "")
    return text.replace(folder, os.path.basename(folder))


class _Sink(io.RawIOBase):
    """A file for pyarrow that passes what is written to a function."""

    def __init__(self, feed: Feed):
        self._feed = feed

    def writable(self) -> bool:
        """Tells pyarrow that the file can be written to."""
        return True

    def write(self, data, /) -> int:
        """Passes bytes on."""
        self._feed(data)
        return memoryview(data).nbytes


def read_rows(dataset: Any, path: str) -> Iterator[Record]:
    """Yields the records of a data set, which may be streamed."""
    # In Arrow format, a dataset gives the stored values, without decoding images.
    with dataset_errors(path):
        for table in dataset.with_format("arrow").iter(batch_size=_DATASET_ROWS):
            yield from arrow_rows(table, path)

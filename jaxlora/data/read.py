"""A job's records, from a file, a saved dataset or the Hugging Face hub."""

import csv
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from jaxlora.config import DataConfig
from jaxlora.errors import DataError

Record = dict[str, Any]

_LARGEST_CSV_BLOCK_BYTES = 2**31 - 1


def read_records(data: DataConfig) -> list[Record]:
    """Reads the records of `data`, in the order in which they are stored.

    A path that exists is read as a file (by its suffix) or as a folder written by
    `datasets.save_to_disk`; any other path is a dataset id on the hub.

    Args:
        data: Where the records are; `limit` stops the reading early.

    Returns:
        The records, at least one.

    Raises:
        DataError: The data is missing, damaged, empty or of an unknown form.
    """
    path = Path(data.path).expanduser()
    if path.is_file():
        records = _read_file(path, data)
    elif path.is_dir():
        records = _read_saved_dataset(path, data)
    elif path.suffix in _READERS or _is_no_hub_id(data.path):
        raise DataError(
            f"{data.path}: no such file or folder (looked in {Path.cwd()}). Correct "
            "data.path, or give a dataset id such as 'owner/name'."
        )
    else:
        records = _read_hub(data)
    if not records:
        raise DataError(f"{data.path}: holds no records. Give data with at least one.")
    return records


def _is_no_hub_id(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or path == ""


def _read_file(path: Path, data: DataConfig) -> list[Record]:
    if path.suffix not in _READERS:
        raise DataError(
            f"{data.path}: unknown suffix {path.suffix!r}. Convert the file to one of: "
            f"{', '.join(_READERS)}."
        )
    for key in ("split", "subset"):
        if getattr(data, key) is not None:
            raise DataError(
                f"{data.path}: {key}={getattr(data, key)!r} is for Hugging Face "
                f"datasets, and this is one file. Remove data.{key}."
            )
    return list(itertools.islice(_READERS[path.suffix](path), data.limit))


def _read_jsonl(path: Path) -> Iterator[Record]:
    # By bytes, so that only \n ends a line and a bad byte is known by its line.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            text = _decode(line, where)
            if not text.strip():
                continue
            record = _parse_json(text, where, "Each line must be one JSON object.")
            if not isinstance(record, dict):
                raise DataError(
                    f"{where}: holds {_json_kind(record)}, not an object. Write one "
                    '{"field": value, ...} a line.'
                )
            yield record


def _read_json(path: Path) -> Iterator[Record]:
    cure = "If it has one object a line, rename it to .jsonl."
    records = _parse_json(_decode(path.read_bytes(), str(path)), str(path), cure)
    if not isinstance(records, list):
        raise DataError(
            f"{path}: holds {_json_kind(records)}, not a list of objects. Wrap the "
            "records in [...], or write one a line in a .jsonl file."
        )
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise DataError(
                f"{path}: record {number} is {_json_kind(record)}, not an object. "
                "Each item of the list must be an object of fields."
            )
    return iter(records)


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {content[error.start]:#04x} is not UTF-8. Save the file as "
            "UTF-8."
        ) from error


def _parse_json(text: str, where: str, cure: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not valid JSON ({error}). {cure}") from error


def _json_kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise DataError(
            f"{path}: cannot be read as Parquet ({error}). Write the file again."
        ) from error


def _read_csv(path: Path) -> Iterator[Record]:
    cure = "Save it as UTF-8, comma-separated, with a header row."
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file), [])
        for name in names:
            if names.count(name) > 1:
                raise DataError(f"{path}: two columns are named {name!r}. Rename one.")
        if not names:
            return iter(())
        table = pyarrow.csv.read_csv(
            path,
            # One block, as pyarrow fails where a row is longer than a block.
            pyarrow.csv.ReadOptions(
                block_size=min(path.stat().st_size + 1, _LARGEST_CSV_BLOCK_BYTES)
            ),
            pyarrow.csv.ParseOptions(newlines_in_values=True),
            # Text stays text: a column of labels 0 and 1 must not become numbers.
            pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                strings_can_be_null=False,
            ),
        )
    except (pa.ArrowException, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as CSV ({error}). {cure}") from error
    return iter(table.to_pylist())


_READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}


def _import_datasets(path: str):
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path}: Hugging Face datasets need the package `datasets`, which cannot "
            f"be imported ({error}). Install it: pip install 'jaxlora[datasets]'."
        ) from error
    return datasets


def _read_saved_dataset(path: Path, data: DataConfig) -> list[Record]:
    marks = ("state.json", "dataset_dict.json")
    if not any((path / mark).is_file() for mark in marks):
        raise DataError(
            f"{data.path}: is a folder without {' or '.join(marks)}, so it was not "
            "written by datasets.save_to_disk. Name a file in it instead."
        )
    if data.subset is not None:
        raise DataError(
            f"{data.path}: subset={data.subset!r} is for datasets on the hub, and this "
            "is a saved folder. Remove data.subset."
        )
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
    return _take(_choose_split(loaded, data), data)


def _read_hub(data: DataConfig) -> list[Record]:
    datasets = _import_datasets(data.path)
    try:
        loaded = datasets.load_dataset(data.path, data.subset, split=data.split)
    # Whatever goes wrong in there (network, no such id, split or subset, a bad file),
    # its own words say it best.
    except Exception as error:
        hint = ""
        if any(os.environ.get(k) for k in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")):
            hint = " Offline mode is on (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set)."
        raise DataError(
            f"{data.path}: is no file or folder here, and could not be loaded as a "
            f"dataset from the hub (subset={data.subset!r}, split={data.split!r}; "
            f"{type(error).__name__}: {error}).{hint} Correct data.path, data.subset "
            "or data.split."
        ) from error
    if data.split is None:
        loaded = _choose_split(loaded, data)
    return _take(loaded, data)


def _choose_split(loaded, data: DataConfig):
    """The dataset itself, or the one that `data.split` means of a dict of them."""
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


def _take(dataset, data: DataConfig) -> list[Record]:
    length = len(dataset) if data.limit is None else min(data.limit, len(dataset))
    # A dataset may have been saved with a format that yields tensors.
    return dataset.with_format(None).select(range(length)).to_list()

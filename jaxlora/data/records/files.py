"""Readers of data files, which read a few records at a time."""

import contextlib
import csv
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from jaxlora.errors import DataError

Record = dict[str, Any]

# The depth of records is limited, because later code walks through them recursively.
_DEEPEST = 100
_ARROW_ROWS = 128
_ARROW_MAGIC = b"ARROW1"


class BadLineError(DataError):
    """A line of a file cannot be read, and the other lines can.

    Readers yield these errors in place of records.

    Attributes:
        path: The file.
        text: What is wrong, which begins with the number of the line.
    """

    def __init__(self, path: Path, text: str):
        """Makes an error.

        Args:
            path: The file.
            text: What is wrong, which begins with the number of the line.
        """
        super().__init__(f"{path}, {text}")
        self.path, self.text = path, text


def read_file(path: Path, *, keeps_bad: bool) -> Iterator[Record | BadLineError]:
    """Reads a file of records, by its suffix.

    Args:
        path: The file.
        keeps_bad: Whether errors of single lines are yielded, not raised.

    Raises:
        DataError: The file, or a line of it, cannot be read.
    """
    for record in READERS[path.suffix](path):
        if not keeps_bad and isinstance(record, BadLineError):
            raise record
        yield record


def _read_jsonl(path: Path) -> Iterator[Record | BadLineError]:
    # The file is read as bytes, so that only \n ends a line and errors name the line.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = _parse_line(line, f"line {number}")
            except DataError as error:
                yield BadLineError(path, str(error))
                continue
            if record is not None:
                yield record


def _parse_line(line: bytes, where: str) -> Record | None:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(error, where) from error
    text = text.rstrip("\r\n")  # so that errors count the characters of this line
    if not text.strip():
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        cure = "Each line must be one JSON object."
        raise _bad_json(error, where, cure) from error
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: holds {_json_kind(record)}, not an object. Write one "
            '{"field": value, ...} per line.'
        )
    if text.count("{") + text.count("[") > _DEEPEST:  # most records need no search
        _check_depth(record, where)
    return record


def _not_utf8(error: UnicodeDecodeError, where: str) -> DataError:
    byte = error.object[error.start]
    return DataError(f"{where}: byte {byte:#04x} is not UTF-8. Save the file as UTF-8.")


def _bad_json(error: Exception, where: str, cure: str) -> DataError:
    if isinstance(error, json.JSONDecodeError):
        why = f"{error.msg} at character {error.colno}"
        return DataError(f"{where}: is not valid JSON ({why}). {cure}")
    if isinstance(error, RecursionError):
        return DataError(f"{where}: is not valid JSON (nested too deep). {cure}")
    # The only other error is an integer with more digits than int() reads.
    limit = sys.get_int_max_str_digits()
    return DataError(
        f"{where}: holds an integer with more than {limit} digits. Write it as a "
        "string, in quotes."
    )


def _json_kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")


def _check_depth(record: Record, where: str) -> None:
    """Checks that a record is not nested too deeply.

    Args:
        record: A parsed JSON object.
        where: Describes the record in the error.

    Raises:
        DataError: The record is nested too deeply.
    """
    level, depth = list(record.values()), 1
    while level:
        if depth > _DEEPEST:
            raise DataError(
                f"{where}: lists and objects are nested more than {_DEEPEST} levels "
                "deep. Flatten the record."
            )
        nested = [v for v in level if isinstance(v, dict | list)]
        level = [x for v in nested for x in (v.values() if type(v) is dict else v)]
        depth += 1


def _read_json(path: Path) -> Iterator[Record]:
    cure = "If the file has one object per line, rename it to .jsonl."
    try:
        records = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf8(error, str(path)) from error
    except (ValueError, RecursionError) as error:
        where = str(path)
        if isinstance(error, json.JSONDecodeError):
            where += f", line {error.lineno}"
        raise _bad_json(error, where, cure) from error
    if not isinstance(records, list):
        raise DataError(
            f"{path}: holds {_json_kind(records)}, not a list of objects. Wrap the "
            "records in [...], or write one per line in a .jsonl file."
        )
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise DataError(
                f"{path}: record {number} is {_json_kind(record)}, not an object. "
                "Each item of the list must be an object of fields."
            )
        _check_depth(record, f"{path}: record {number}")
        yield record


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow.parquet

    with _damage(path, "Parquet"), pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_ARROW_ROWS):
            yield from arrow_rows(batch, str(path))


def _read_arrow(path: Path) -> Iterator[Record]:
    with _damage(path, "Arrow IPC"), pa.OSFile(str(path)) as file:
        for batch in _record_batches(file):
            for start in range(0, batch.num_rows, _ARROW_ROWS):
                yield from arrow_rows(batch.slice(start, _ARROW_ROWS), str(path))


def _record_batches(file: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow file, which Feather is too, or of an Arrow stream."""
    is_stream = file.read(len(_ARROW_MAGIC)) != _ARROW_MAGIC
    file.seek(0)
    if is_stream:
        yield from pa.ipc.open_stream(file)
        return
    reader = pa.ipc.open_file(file)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


@contextlib.contextmanager
def _damage(path: Path, form: str) -> Iterator[None]:
    """Turns pyarrow's errors into ours."""
    try:
        yield
    except DataError:
        raise
    # pyarrow may raise any error on a damaged file, even OSError and MemoryError.
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise  # an error of the disk, not of the file's contents
        raise DataError(
            f"{path}: cannot be read as {form} ({error}). Write the file again."
        ) from error


@contextlib.contextmanager
def os_errors(path: str) -> Iterator[None]:
    """Turns errors of the disk into ours."""
    try:
        yield
    except OSError as error:
        # pyarrow's texts of errors name the path, too.
        why = os.strerror(error.errno) if error.errno else error
        raise DataError(
            f"{path}: cannot be read: {why}. Check the path, its permissions, and the "
            "disk."
        ) from error


def arrow_rows(table: pa.RecordBatch | pa.Table, where: str) -> list[Record]:
    """The rows of an Arrow table.

    Args:
        table: The table.
        where: Describes the table in errors.

    Raises:
        DataError: Two columns have the same name, or a value has no Python equivalent.
    """
    names = table.schema.names
    _check_names(names, where)
    try:
        # Damaged offsets would make Python read outside the buffer and crash.
        table.validate(full=True)
        return table.to_pylist()
    except Exception as error:
        for name, column in zip(names, table.columns, strict=True):
            try:
                column.validate(full=True)
                column.to_pylist()
            except Exception as reason:
                raise DataError(
                    f"{where}: column {name!r} of type {column.type} is damaged or "
                    f"holds a value that Python cannot hold ({reason}). Store it as "
                    "text, or leave the column out."
                ) from reason
        raise DataError(f"{where}: its rows cannot be read ({error}).") from error


def _check_names(names: list[str], where: str) -> None:
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{where}: two columns are named {name!r}. Rename one.")


def _read_csv(path: Path) -> Iterator[Record | BadLineError]:
    # Fields may be of any length. The csv module has one limit for the whole process.
    csv.field_size_limit(sys.maxsize)
    # Bytes that are not UTF-8 become surrogates, so that they only spoil their row.
    options: Any = {"encoding": "utf-8-sig", "errors": "surrogateescape"}
    with path.open(newline="", **options) as file:
        reader = csv.reader(file, strict=True)
        names = _next_row(reader, path)
        if isinstance(names, BadLineError):
            raise names
        _check_names(names or [], str(path))
        while (row := _next_row(reader, path)) is not None:
            if isinstance(row, BadLineError):
                yield row
            elif names and len(row) == len(names):
                yield dict(zip(names, row, strict=True))
            elif row:
                why = f"the row has {len(row)} fields, the header {len(names or [])}"
                yield _bad_row(reader.line_num, why, path)


def _next_row(reader: Any, path: Path) -> list[str] | BadLineError | None:
    """Returns the next row of a CSV file, or why it cannot be read; None at the end."""
    before = reader.line_num
    try:
        row = next(reader, None)
        "".join(row or ()).encode()
    except csv.Error as error:
        if reader.line_num == before + 1:
            return _bad_row(reader.line_num, str(error), path)
        # A quote that is not closed hides the rows after it.
        why = f"{error}, in the row that begins in line {before + 1}"
        raise DataError(str(_bad_row(reader.line_num, why, path))) from error
    except UnicodeEncodeError as error:
        byte = ord(error.object[error.start]) & 0xFF
        return _bad_row(reader.line_num, f"byte {byte:#04x} is not UTF-8", path)
    return row


def _bad_row(line: int, why: str, path: Path) -> BadLineError:
    return BadLineError(
        path,
        f"line {line}: cannot be read as CSV ({why}). Save it as UTF-8, "
        "comma-separated, with a header row.",
    )


READERS: dict[str, Callable[[Path], Iterator[Record | BadLineError]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}

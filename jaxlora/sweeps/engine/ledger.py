"""The ledger of a sweep over several groups: what has happened, in order of arrival.

One process, the driver, appends to it. A record is a line of JSON, and takes effect
elsewhere only when it is on the disk. Its checksum also covers that of the line before,
so a line that was changed, added, moved or left out is noticed.
"""

import json
import os
import pathlib
from collections.abc import Callable, Sequence

import pydantic

from jaxlora.common.atomic import make_folder, sync_folder, wrap_os_errors
from jaxlora.common.json_file import open_regular_file, parse_json
from jaxlora.errors import CheckpointError
from jaxlora.problems import format_errors
from jaxlora.run.folder import SWEEP_LEDGER
from jaxlora.run.saved_run import checksum
from jaxlora.sweeps.engine.state import Record, check_record


class Ledger:
    """Appends to the ledger in a run's folder, which is locked."""

    def __init__(self, folder: pathlib.Path):
        """Opens the ledger, and removes a last record that a kill cut short.

        Args:
            folder: Folder of the run; it is made if it does not exist.

        Raises:
            CheckpointError: A record is damaged or was changed.
            StorageError: It cannot be written, or is no regular file.
        """
        self._path = folder / SWEEP_LEDGER
        with wrap_os_errors(self._path):
            make_folder(folder)
            self.records, num_bytes, self._seal = _read(self._path)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self._file = os.open(self._path, flags, 0o666)
            os.ftruncate(self._file, num_bytes)
            sync_folder(folder)

    def append(self, records: Sequence[Record]) -> None:
        """Adds records; they are on the disk when this returns.

        Raises:
            StorageError: They cannot be written; none of them was.
        """
        if not records:
            return
        lines, seal = b"", self._seal
        for record in records:
            seal = checksum([seal, record])
            lines += json.dumps({**record, "checksum": seal}).encode() + b"\n"
        with wrap_os_errors(self._path):
            size = os.fstat(self._file).st_size
            try:
                rest = memoryview(lines)
                while rest:  # an almost full disk may accept only a part
                    rest = rest[os.write(self._file, rest) :]
                os.fdatasync(self._file)
            except OSError:
                os.ftruncate(self._file, size)
                raise
        self._seal = seal

    def begin(self, record: Record) -> None:
        """Adds a record of how the sweep begins, as if it had been read."""
        self.append([record])
        self.records.append(record)

    def replay(self, follow: Callable[[Record], None]) -> None:
        """Gives the records that were read to a function, and forgets them.

        Args:
            follow: Raises ValueError for a record that contradicts those before.

        Raises:
            CheckpointError: It did.
        """
        for number, record in enumerate(self.records, 1):
            try:
                follow(record)
            except ValueError as error:
                raise _damage(self._path, number, error) from None
        self.records.clear()

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def has_ledger(folder: pathlib.Path) -> bool:
    """Whether a sweep over several groups has begun in a folder."""
    return os.path.lexists(folder / SWEEP_LEDGER)


def _read(path: pathlib.Path) -> tuple[list[Record], int, str]:
    """Returns the complete records, their number of bytes, and the last checksum."""
    try:
        with open_regular_file(path, follow=False) as file:
            data = file.read()
    except FileNotFoundError:
        return [], 0, ""
    *lines, _ = data.split(b"\n")
    records, seal = [], ""
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
            if not isinstance(record, dict):
                raise ValueError(f"it is a {type(record).__name__}, not an object")
            given, seal = record.pop("checksum", None), checksum([seal, record])
            if given is None:
                raise ValueError("it has no checksum")
            if given != seal:
                raise ValueError("its checksum does not match it and the lines before")
            if (record.get("kind") == "sweep") != (number == 1):
                raise ValueError(
                    "the first record, and no other, must be of kind sweep"
                )
            check_record(record)
        except ValueError as error:
            raise _damage(path, number, error) from None
        records.append(record)
    return records, data.rfind(b"\n") + 1, seal


def _damage(path: pathlib.Path, number: int, error: ValueError) -> CheckpointError:
    reason = str(error)
    if isinstance(error, pydantic.ValidationError):
        reason = format_errors(error, "it")
    return CheckpointError(
        f"{path}, line {number} is not a record of this sweep, so what follows it is "
        f"unknown: {reason.rstrip('.')}. Restore the file from a copy, or choose "
        "another output_dir."
    )

"""The ledger of a sweep over several groups: what has happened, in order of arrival.

One process, the driver, appends to it. A record is a line of JSON, and takes effect
elsewhere only when it is on the disk.
"""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxlora.common.atomic import make_folder, sync_folder, wrap_os_errors
from jaxlora.common.json_file import open_regular_file
from jaxlora.errors import CheckpointError
from jaxlora.run.folder import SWEEP_LEDGER

Record = dict[str, Any]


class Ledger:
    """Appends to the ledger in a run's folder, which is locked."""

    def __init__(self, folder: pathlib.Path):
        """Opens the ledger, and removes a last record that a kill cut short.

        Args:
            folder: Folder of the run; it is made if it does not exist.

        Raises:
            CheckpointError: A record is damaged.
            StorageError: It cannot be written.
        """
        self._path = folder / SWEEP_LEDGER
        with wrap_os_errors(self._path):
            make_folder(folder)
            self.records, num_bytes = _read(self._path)
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
        lines = "".join(json.dumps(record) + "\n" for record in records).encode()
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

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def has_ledger(folder: pathlib.Path) -> bool:
    """Whether a sweep over several groups has begun in a folder."""
    return os.path.lexists(folder / SWEEP_LEDGER)


def _read(path: pathlib.Path) -> tuple[list[Record], int]:
    """Returns the complete records, and the number of bytes that they have."""
    try:
        with open_regular_file(path, follow=False) as file:
            data = file.read()
    except FileNotFoundError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    records = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            if not isinstance(record["kind"], str):
                raise ValueError("its kind is no text")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}, line {number} is not a record of a sweep ({error}), so what "
                "follows it is unknown. Restore the file from a copy, or choose "
                "another output_dir."
            ) from None
        records.append(record)
    return records, len(whole)

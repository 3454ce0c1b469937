"""The file by which other processes see the state of a run."""

import dataclasses
import datetime
import pathlib
import time
from typing import Any

import pydantic

from jaxlora.common.atomic import write_text
from jaxlora.common.json_file import read_regular_file
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.problems import format_errors
from jaxlora.run.callback import Callback
from jaxlora.run.events import Event, RunEndEvent, RunStartEvent
from jaxlora.run.saved_fields import STRICT, IsoTime, type_adapter
from jaxlora.run.status import RunStatus, StatusTracker

STATUS_FILE = "status.json"
_SECONDS = 2.0  # between writes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedStatus:
    """The contents of status.json.

    Attributes:
        written: Time at which it was written, in ISO format.
        run: State of the run at that time.
    """

    __pydantic_config__ = STRICT

    written: IsoTime
    run: RunStatus

    def seen(self, *, is_live: bool) -> "SavedStatus":
        """Returns what the file means now; after a kill it says that jobs are running.

        Args:
            is_live: Whether a process trains the run.
        """
        run = dataclasses.replace(self.run, is_live=is_live)
        return dataclasses.replace(self, run=run)

    def values(self) -> dict[str, Any]:
        """Returns the contents as JSON values, with the statuses for users."""
        return {"written": self.written, "run": self.run.values()}


class StatusFile(Callback):
    """Writes status.json while a run trains.

    Training waits while the file goes to the disk, so it is written at an event if two
    seconds have passed since the last time, at the start and at the end.
    """

    def __init__(self, folder: pathlib.Path, tracker: StatusTracker):
        """Makes the object.

        Args:
            folder: Folder of the run.
            tracker: Follows the same events, and receives them first.
        """
        self._path, self._tracker = folder / STATUS_FILE, tracker
        self._written, self._is_old = -_SECONDS, False

    def on_event(self, event: Event) -> None:
        """Writes the file, unless it was written just now.

        Raises:
            StorageError: It cannot be written.
        """
        is_edge = isinstance(event, RunStartEvent | RunEndEvent)
        if is_edge or time.monotonic() >= self._written + _SECONDS:
            self._write()
        else:
            self._is_old = True

    def _write(self) -> None:
        self._written, self._is_old = time.monotonic(), False
        write_status(self._path, self._tracker.status())

    def close(self) -> None:
        """Writes what is missing from the file when a run ends with an error.

        Raises:
            StorageError: It cannot be written.
        """
        # The run says itself that its folder was removed; no part is made again.
        if self._is_old and self._path.exists():
            self._write()


def write_status(path: pathlib.Path, run: RunStatus) -> None:
    """Writes the state of a run as it is now.

    Raises:
        StorageError: The file cannot be written.
    """
    written = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    status = SavedStatus(written=written, run=run)
    text = type_adapter(SavedStatus).dump_json(status).decode()
    write_text(path, text + "\n")


def read_status(folder: pathlib.Path) -> SavedStatus:
    """Reads the state of the run in a folder.

    Raises:
        ConfigError: There is no run.
        CheckpointError: The file is damaged.
    """
    path = folder / STATUS_FILE
    try:
        data = read_regular_file(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} holds no run that has begun to train: there is no {STATUS_FILE}."
            " Check the path; it is the output_dir of a run."
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path} cannot be read: {reason}.") from error
    try:
        return type_adapter(SavedStatus).validate_json(data)
    except pydantic.ValidationError as error:
        raise CheckpointError(
            f"{format_errors(error, str(path))}\nThe run writes it again while it "
            "trains."
        ) from None

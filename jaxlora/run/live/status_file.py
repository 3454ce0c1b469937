"""The file by which other processes see the state of a run."""

import dataclasses
import datetime
import json
import pathlib
import threading
import time
from typing import Any

import pydantic

from jaxlora.common.atomic import write_text
from jaxlora.common.json_file import read_regular_file
from jaxlora.common.type_adapter import type_adapter
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.problems import format_errors
from jaxlora.run.callback import Callback
from jaxlora.run.events import Event, RunEndEvent, RunStartEvent, StepEvent
from jaxlora.run.saved_fields import STRICT, IsoTime
from jaxlora.run.status import RunStatus, StatusTracker

STATUS_FILE = "status.json"
_STEP_SECONDS = 2.0  # between writes for steps and windows
_EVENT_SECONDS = 0.2  # and for the others, such as starts of 64 jobs


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

    Training waits while the file goes to the disk, so jobs that start or end together
    are written together, and steps every two seconds at most.
    """

    def __init__(self, folder: pathlib.Path, tracker: StatusTracker):
        """Makes the object.

        Args:
            folder: Folder of the run.
            tracker: Follows the same events, and receives them first.
        """
        self._path, self._tracker = folder / STATUS_FILE, tracker
        self._written = -_STEP_SECONDS
        self._lock = threading.Lock()  # of the file
        self._soon: threading.Timer | None = None  # writes what has been put off
        self._failure: BaseException | None = None

    def on_event(self, event: Event) -> None:
        """Writes the file, or puts that off for a moment if it was written just now.

        Raises:
            StorageError: It cannot be written.
        """
        if self._failure is not None:
            raise self._failure
        if isinstance(event, RunStartEvent | RunEndEvent):
            self._write()
            return
        is_frequent = isinstance(event, StepEvent) or event.kind == "window"
        seconds = _STEP_SECONDS if is_frequent else _EVENT_SECONDS
        left = self._written + seconds - time.monotonic()
        if left <= 0:
            self._write()
        elif not is_frequent and self._soon is None:
            self._soon = threading.Timer(left, self._write_soon)
            self._soon.daemon = True
            self._soon.start()

    def _write(self) -> None:
        with self._lock:
            self._written = time.monotonic()
            now = datetime.datetime.now().astimezone()
            status = SavedStatus(
                written=now.isoformat(timespec="seconds"), run=self._tracker.status()
            )
            write_text(self._path, json.dumps(dataclasses.asdict(status)) + "\n")

    def _write_soon(self) -> None:
        self._soon = None  # an event that comes now is put off anew
        # The run says itself that its folder was removed; no part is made again.
        if not self._path.exists():
            return
        try:
            self._write()
        except BaseException as error:
            if self._path.exists():
                self._failure = error

    def close(self) -> None:
        """Writes what was put off.

        Raises:
            StorageError: It cannot be written.
        """
        if (soon := self._soon) is not None:
            soon.cancel()
            self._write_soon()
        if self._failure is not None:
            raise self._failure


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

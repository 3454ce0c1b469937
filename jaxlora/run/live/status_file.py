"""The file by which other processes see the state of a run."""

import dataclasses
import datetime
import json
import pathlib
import time
from typing import Any

import pydantic

from jaxlora.common.atomic import write_text
from jaxlora.common.json_file import read_regular_file
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.problems import format_errors
from jaxlora.run.callback import Callback
from jaxlora.run.events import Event, StepEvent
from jaxlora.run.folder import STATUS_FILE
from jaxlora.run.saved_fields import STRICT, IsoTime
from jaxlora.run.status import RunStatus, StatusTracker

_WRITE_SECONDS = 2.0


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
    """Writes status.json while a run trains, every two seconds at most."""

    def __init__(self, folder: pathlib.Path, tracker: StatusTracker):
        """Makes the object.

        Args:
            folder: Folder of the run.
            tracker: Follows the same events, and receives them first.
        """
        self._path, self._tracker = folder / STATUS_FILE, tracker
        self._written = -_WRITE_SECONDS

    def on_event(self, event: Event) -> None:
        """Writes the file, unless it was written just now.

        Raises:
            StorageError: It cannot be written.
        """
        is_frequent = isinstance(event, StepEvent) or event.kind == "window"
        now = time.monotonic()
        if is_frequent and now - self._written < _WRITE_SECONDS:
            return
        self._written = now
        status = SavedStatus(
            written=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            run=self._tracker.status(),
        )
        write_text(self._path, json.dumps(dataclasses.asdict(status)) + "\n")


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
        return pydantic.TypeAdapter(SavedStatus).validate_json(data)
    except pydantic.ValidationError as error:
        raise CheckpointError(
            f"{format_errors(error, str(path))}\nThe run writes it again while it "
            "trains."
        ) from None

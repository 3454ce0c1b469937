"""Keeps a copy of the run file in the run's folder."""

import pathlib

from jaxlora.common.atomic import write_bytes
from jaxlora.run.callback import Callback
from jaxlora.run.events import RunStartEvent
from jaxlora.run.folder import RUN_FILE_COPY


class KeepRunFile(Callback):
    """Copies the run file as it was when the command began."""

    def __init__(self, path: str | pathlib.Path):
        """Reads the run file.

        Args:
            path: The run file.
        """
        self._text = pathlib.Path(path).read_bytes()

    def on_run_start(self, event: RunStartEvent) -> None:
        """Writes the copy.

        Raises:
            StorageError: It cannot be written.
        """
        write_bytes(event.output_dir / RUN_FILE_COPY, self._text)

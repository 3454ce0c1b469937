"""Writes the texts that jobs generate at their evaluations into a text file."""

import logging
import pathlib
from typing import Any

from jaxlora.common.atomic import wrap_os_errors, write_text
from jaxlora.run.callback import Callback
from jaxlora.run.events import SampleEvent
from jaxlora.run.folder import SAMPLES_FILE
from jaxlora.run.log import METRICS_FILE, read_events

logger = logging.getLogger(__name__)

_MOST_LOGGED = 200  # characters of a text that the log shows


class SampleFile(Callback):
    """Writes samples.txt, and a line of the log for each text.

    The file repeats what metrics.jsonl has, for reading. So when a run is resumed, the
    texts after its checkpoint, which will be generated again, are dropped.
    """

    def __init__(self, folder: pathlib.Path):
        """Opens the file of a run; its metrics.jsonl must be open already.

        Args:
            folder: Folder of the run.

        Raises:
            CheckpointError: metrics.jsonl cannot be read.
            StorageError: The file cannot be written.
        """
        self._path = folder / SAMPLES_FILE
        events = read_events(folder / METRICS_FILE)
        kept = [_block(event) for event in events if event["event"] == "sample"]
        write_text(self._path, "".join(kept))

    def on_sample(self, event: SampleEvent) -> None:
        """Writes a text.

        Raises:
            StorageError: The file cannot be written.
        """
        shown = event.text[:_MOST_LOGGED]
        logger.info("%s: step %d: %r: %r", event.job, event.step, event.prompt, shown)
        with (
            wrap_os_errors(self._path),
            open(self._path, "a", encoding="utf-8") as file,
        ):
            file.write(_block(event.values()))


def _block(values: dict[str, Any]) -> str:
    """Returns the lines for an event."""
    head = f"== {values['job']}, step {values['step']}, prompt {values['number']}"
    texts = f"{values['prompt']}\n--\n{values['text']}"
    return f"{head} ({values['finish_reason']})\n{texts}\n\n"

"""The callbacks that every run has: its log, its display, its trackers, its files."""

import contextlib
import logging
import pathlib
from contextlib import closing
from typing import Any

from jaxlora.common.atomic import wrap_os_errors, write_text
from jaxlora.config import RunConfig
from jaxlora.config.run_file import RunFile
from jaxlora.distributed import processes
from jaxlora.run.callback import Callback
from jaxlora.run.events import RunStartEvent, SampleEvent
from jaxlora.run.folder import RUN_FILE_COPY, SAMPLES_FILE
from jaxlora.run.live.status_file import StatusFile
from jaxlora.run.log import METRICS_FILE, RunLog, read_events
from jaxlora.run.status import StatusTracker
from jaxlora.trackers.table import open_trackers
from jaxlora.train.report.plot import LossPlot
from jaxlora.train.report.progress import Progress

logger = logging.getLogger(__name__)

_MOST_LOGGED = 200  # characters of a text that the log shows


def open_callbacks(
    config: RunConfig,
    folder: pathlib.Path,
    keep_rounds: int | None,
    opened: contextlib.ExitStack,
) -> list[Callback]:
    """Opens the callbacks of a run, in the order in which they receive events.

    Args:
        config: The run.
        folder: Folder of the run.
        keep_rounds: Rounds done at the checkpoint that the run resumes from; None if
            it is new.
        opened: Closes them.

    Returns:
        The callbacks; none on processes other than the first.

    Raises:
        CheckpointError: The log of the resumed run is damaged.
        StorageError: A file cannot be written.
    """
    if not processes.is_first():
        return []
    log = opened.enter_context(closing(RunLog(folder, keep_rounds=keep_rounds)))
    trackers = open_trackers(config.report_to, folder)
    for opened_tracker in trackers:
        opened.callback(opened_tracker.close)
    tracker = StatusTracker()
    display = Progress(tracker, log_every=config.log_every)
    progress = opened.enter_context(closing(display))
    progress.start()
    status = opened.enter_context(closing(StatusFile(folder, tracker)))
    samples = [] if config.samples is None else [SampleFile(folder)]
    return [log, *trackers, tracker, status, LossPlot(folder), *samples, progress]


class KeepRunFile(Callback):
    """Copies the run file as it was when the command began.

    A comment at the top says which of its settings the command line has replaced.
    """

    def __init__(self, file: RunFile):
        """Reads the run file.

        Args:
            file: The run file.
        """
        self._text = file.kept_text()

    def on_run_start(self, event: RunStartEvent) -> None:
        """Writes the copy.

        Raises:
            StorageError: It cannot be written.
        """
        self.write(event.output_dir)

    def write(self, folder: pathlib.Path) -> None:
        """Writes the copy into the folder of a run.

        Raises:
            StorageError: It cannot be written.
        """
        write_text(folder / RUN_FILE_COPY, self._text)


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

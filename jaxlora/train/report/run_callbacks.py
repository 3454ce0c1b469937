"""The callbacks that every run has: its log, its display, its trackers, its files."""

import contextlib
import pathlib

from jaxlora.common.atomic import write_bytes
from jaxlora.config import RunConfig
from jaxlora.distributed import processes
from jaxlora.run.callback import Callback
from jaxlora.run.events import RunStartEvent
from jaxlora.run.folder import RUN_FILE_COPY
from jaxlora.run.live.status_file import StatusFile
from jaxlora.run.log import RunLog
from jaxlora.run.status import StatusTracker
from jaxlora.trackers.table import open_trackers
from jaxlora.train.report.plot import LossPlot
from jaxlora.train.report.progress import Progress
from jaxlora.train.report.sample_file import SampleFile


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
    log = RunLog(folder, keep_rounds=keep_rounds)
    opened.callback(log.close)
    trackers = open_trackers(config.report_to, folder)
    for opened_tracker in trackers:
        opened.callback(opened_tracker.close)
    tracker = StatusTracker()
    progress = Progress(tracker, log_every=config.log_every)
    opened.callback(progress.close)
    progress.start()
    samples = [] if config.samples is None else [SampleFile(folder)]
    files = [StatusFile(folder, tracker), LossPlot(folder), *samples]
    return [log, *trackers, tracker, *files, progress]


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

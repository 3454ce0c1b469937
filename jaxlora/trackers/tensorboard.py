"""Writes TensorBoard files: a run for each job, with the same tags for all."""

import contextlib
import os
import pathlib
import socket
import time
from typing import Any

from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import hparams, text

from jaxlora.common.atomic import make_folder, wrap_os_errors
from jaxlora.run.callback import Callback
from jaxlora.run.events import (
    Event,
    JobAddEvent,
    JobEndEvent,
    JobEvent,
    JobInfo,
    RunStartEvent,
    SampleEvent,
    WindowEvent,
)
from jaxlora.trackers.tracker import (
    EVAL_LOSS,
    TRAIN_LOSS,
    hyperparameters,
    job_metrics,
    run_metrics,
)

_proto: Any = event_pb2  # its classes are made when it is imported
_summaries: Any = summary_pb2
_FLUSH_SECONDS = 30.0


class TensorBoard(Callback):
    """Writes each job's metrics and settings to a folder of its own.

    `tensorboard --logdir` shows each folder as a run, so the curves of all jobs are in
    one chart. The folder itself holds the metrics of the whole run.
    """

    def __init__(self, folder: pathlib.Path):
        """Makes the object; files are opened when they are needed.

        Args:
            folder: Folder of the run, where a folder `tensorboard` is made.
        """
        self._folder = folder / "tensorboard"
        self._infos: dict[str, JobInfo] = {}
        self._boards: dict[str, _Board] = {}  # by job; that of the run is ""

    def on_event(self, event: Event) -> None:
        """Writes the metrics of an event.

        Raises:
            StorageError: A file cannot be written.
        """
        if isinstance(event, RunStartEvent):
            self._infos = {info.settings.name: info for info in event.jobs}
        elif isinstance(event, JobAddEvent):
            self._infos[event.info.settings.name] = event.info
        elif isinstance(event, WindowEvent):
            self._board("", event.round).add(run_metrics(event), event.round)
        elif isinstance(event, JobEvent):
            self._on_job(event)

    def _on_job(self, event: JobEvent) -> None:
        job, metrics = event.job, job_metrics(event)
        if metrics:
            is_new = job not in self._boards
            board = self._board(job, event.step)
            if is_new and job in self._infos:
                board.add_settings(hyperparameters(self._infos[job]))
            board.add(metrics, event.step)
        elif isinstance(event, SampleEvent):
            tag, board = f"samples/{event.number}", self._board(job, event.step)
            board.add_text(tag, f"{event.prompt}\n\n---\n\n{event.text}", event.step)
        elif isinstance(event, JobEndEvent) and job in self._boards:
            self._boards.pop(job).close()

    def _board(self, job: str, first_step: int) -> "_Board":
        if job not in self._boards:
            self._boards[job] = _Board(self._folder / job, first_step=first_step)
        return self._boards[job]

    def close(self) -> None:
        """Closes all files, even if the last values of one cannot be written.

        Raises:
            StorageError: The last values cannot be written.
        """
        with contextlib.ExitStack() as stack:
            while self._boards:
                stack.callback(self._boards.popitem()[1].close)


class _Board:
    """Writes a TensorBoard file in the calling thread, so that errors are raised.

    The writer of tensorboardX uses a thread, which only prints its errors.
    """

    def __init__(self, folder: pathlib.Path, *, first_step: int):
        # Two runs that start in the same second must not share a file.
        name = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / f"events.out.tfevents.{name}.{time.time_ns()}"
        with wrap_os_errors(self._path):
            make_folder(folder)
            self._writer = RecordWriter(str(self._path))
        self._flushed = time.monotonic()
        try:
            self._write(file_version="brain.Event:2")
            # TensorBoard drops what a killed process wrote from this step on.
            start = _proto.SessionLog(status=_proto.SessionLog.START)
            self._write(step=first_step, session_log=start)
        except BaseException:
            self._writer.close()
            raise

    def add_settings(self, settings: dict[str, str | float | bool]) -> None:
        """Writes the settings of a job for TensorBoard's table of hyperparameters."""
        metrics = {TRAIN_LOSS: 0.0, EVAL_LOSS: 0.0}
        experiment, start, _ = hparams(settings, metrics)
        self._write(summary=experiment)
        self._write(summary=start)

    def add(self, metrics: dict[str, float], step: int) -> None:
        """Writes values of one step, by tag, as one record."""
        value = _summaries.Summary.Value
        values = [value(tag=tag, simple_value=metrics[tag]) for tag in metrics]
        self._write(step=step, summary=_summaries.Summary(value=values))

    def add_text(self, tag: str, markdown: str, step: int) -> None:
        """Writes a text of one step."""
        self._write(step=step, summary=text(tag, markdown))

    def _write(self, **fields: Any) -> None:
        event = _proto.Event(wall_time=time.time(), **fields)
        with wrap_os_errors(self._path):
            self._writer.write(event.SerializeToString())
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._writer.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        """Writes what is left, and closes the file."""
        with wrap_os_errors(self._path):
            try:
                self._writer.flush()
            finally:
                self._writer.close()

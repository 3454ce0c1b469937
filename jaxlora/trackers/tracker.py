"""The base class of experiment trackers, to which each job is a run of its own."""

import abc
import contextlib
import pathlib
from typing import Any

from jaxlora.run.callback import Callback
from jaxlora.run.events import (
    Event,
    JobAddEvent,
    JobEndEvent,
    JobEvent,
    JobInfo,
    RunStartEvent,
    SampleEvent,
)
from jaxlora.trackers.metrics import hyperparameters, job_metrics


class JobTracker(Callback, abc.ABC):
    """Opens a run of a tracker for each job that trains, and sends its metrics.

    Texts that a job generates are tables of one row, by the number of the prompt.
    """

    def __init__(self, folder: pathlib.Path):
        """Makes the object; the tracker is opened when a job has a first metric.

        Args:
            folder: Folder of the run, whose name groups the jobs.
        """
        self._folder = folder
        self._infos: dict[str, JobInfo] = {}
        self._runs: dict[str, Any] = {}

    @abc.abstractmethod
    def _open(self, job: str, settings: dict[str, Any]) -> Any:
        """Opens a job's run in the tracker."""

    @abc.abstractmethod
    def _send(self, run: Any, values: dict[str, Any], step: int) -> None:
        """Sends metrics or tables of one step."""

    @abc.abstractmethod
    def _table(self, row: dict[str, Any]) -> Any:
        """Makes a table of one row, with its values by column."""

    @abc.abstractmethod
    def _close(self, run: Any) -> None:
        """Ends a job's run in the tracker."""

    def on_event(self, event: Event) -> None:
        """Sends the metrics or the text of a job's event."""
        if isinstance(event, RunStartEvent):
            self._infos = {info.settings.name: info for info in event.jobs}
        elif isinstance(event, JobAddEvent):
            self._infos[event.info.settings.name] = event.info
        elif isinstance(event, JobEvent):
            self._on_job(event)

    def _on_job(self, event: JobEvent) -> None:
        values: dict[str, Any] = dict(job_metrics(event))
        if isinstance(event, SampleEvent):
            row = {"step": event.step, "prompt": event.prompt, "text": event.text}
            values = {f"samples/{event.number}": self._table(row)}
        if values:
            if event.job not in self._runs:
                settings = hyperparameters(self._infos[event.job])
                self._runs[event.job] = self._open(event.job, settings)
            self._send(self._runs[event.job], values, event.step)
        elif isinstance(event, JobEndEvent) and event.job in self._runs:
            self._close(self._runs.pop(event.job))

    def close(self) -> None:
        """Ends the runs of all jobs, even if one of them cannot be ended."""
        with contextlib.ExitStack() as stack:
            while self._runs:
                stack.callback(self._close, self._runs.popitem()[1])

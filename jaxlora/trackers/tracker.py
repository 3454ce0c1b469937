"""The base class of experiment trackers, and the names and values of metrics.

Names are those of the Hugging Face trainers, so that curves of both overlay. A job has
the same names in every tracker, and each job is a run of its own there.
"""

import abc
import contextlib
import pathlib
from typing import Any

from jaxlora.run.callback import Callback
from jaxlora.run.events import (
    EvalEvent,
    Event,
    JobAddEvent,
    JobEndEvent,
    JobEvent,
    JobInfo,
    RunStartEvent,
    SampleEvent,
    StepEvent,
    WindowEvent,
)

TRAIN_LOSS, EVAL_LOSS, EVAL_METRIC = "train/loss", "eval/loss", "eval/metric"


def job_metrics(event: Event) -> dict[str, float]:
    """Returns the metrics of a job's step or evaluation; empty for other events."""
    if isinstance(event, StepEvent):
        return {
            TRAIN_LOSS: event.loss,
            "train/grad_norm": event.grad_norm,
            "train/learning_rate": event.learning_rate,
            "train/num_tokens": float(event.progress.num_tokens),
            **{f"train/{name}": value for name, value in event.metrics.items()},
        }
    if isinstance(event, EvalEvent):
        metric = {} if event.metric is None else {EVAL_METRIC: event.metric}
        more = {f"eval/{name}": value for name, value in event.metrics.items()}
        return {EVAL_LOSS: event.eval_loss, **metric, **more}
    return {}


def run_metrics(event: WindowEvent) -> dict[str, float]:
    """Returns the metrics of a whole run, whose step is its round."""
    return {"run/tokens_per_second": event.tokens_per_second, "run/fill": event.fill}


def hyperparameters(info: JobInfo) -> dict[str, str | float | bool]:
    """Returns the settings of a job in plain values; those that are None are absent."""
    found: dict[str, str | float | bool] = {}
    for name, value in info.settings.model_dump(mode="json").items():
        if value is None or name == "name":
            continue
        is_plain = isinstance(value, str | int | float | bool)
        found[name] = value if is_plain else str(value)
    paths = ", ".join(one.path for one in info.settings.data.sets)
    return found | {"data": paths, "num_steps": info.num_steps}


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

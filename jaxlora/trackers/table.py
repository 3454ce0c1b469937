"""The experiment trackers that a run can report to, by the names in `report_to`.

Names of metrics are those of the Hugging Face trainers, so that curves of both overlay.
A job has the same names in every tracker, and each job is a run of its own there.

A run goes on when a tracker fails, for example because the network is lost.
"""

import abc
import contextlib
import hashlib
import importlib.util
import logging
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxlora.errors import ConfigError, JaxloraError
from jaxlora.printable import one_line
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

if TYPE_CHECKING:
    from jaxlora.trackers.tensorboard import Board

logger = logging.getLogger(__name__)

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


class Tracker(Callback, abc.ABC):
    """Opens a run of a tracker for each job that trains, and sends its metrics.

    Texts that a job generates are tables of one row, by the number of the prompt.

    If the first metrics cannot be sent, the run ends: a wrong key or folder is found
    at once, and nothing is lost yet. After that, an error is a warning, the tracker
    gets no more events, and the run goes on.
    """

    def __init__(self, name: str, folder: pathlib.Path):
        """Makes the object; the tracker is opened when a job has a first metric.

        Args:
            name: Name of the tracker in `report_to`.
            folder: Folder of the run, whose name groups the jobs.
        """
        self._name, self._folder = name, folder
        self._infos: dict[str, JobInfo] = {}
        self._runs: dict[str, Any] = {}
        self._has_sent = self._is_off = False

    @abc.abstractmethod
    def _open(self, job: str, settings: dict[str, Any], step: int) -> Any:
        """Opens a job's run in the tracker, whose first values are of a step."""

    @abc.abstractmethod
    def _send(self, run: Any, values: dict[str, Any], step: int) -> None:
        """Sends metrics or tables of one step, by name."""

    @abc.abstractmethod
    def _table(self, row: dict[str, Any]) -> Any:
        """Makes a table of one row, with its values by column."""

    @abc.abstractmethod
    def _close(self, run: Any) -> None:
        """Ends a job's run in the tracker."""

    def on_event(self, event: Event) -> None:
        """Sends an event, unless the tracker has failed.

        Raises:
            JaxloraError: The tracker fails before it has received any metrics.
        """
        if self._is_off:
            return
        try:
            self._follow(event)
        except Exception as error:  # whatever the tracker's package raises
            if not self._has_sent:
                raise self._cannot_start(error) from error
            self._switch_off(error)

    def _follow(self, event: Event) -> None:
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
            self._report(event.job, values, event.step)
        elif isinstance(event, JobEndEvent) and event.job in self._runs:
            self._close(self._runs.pop(event.job))

    def _report(self, job: str, values: dict[str, Any], step: int) -> None:
        if job not in self._runs:
            info = self._infos.get(job)
            settings = {} if info is None else hyperparameters(info)
            self._runs[job] = self._open(job, settings, step)
        self._send(self._runs[job], values, step)
        self._has_sent = True

    def close(self) -> None:
        """Ends the runs of all jobs; an error is a warning, too."""
        try:
            with contextlib.ExitStack() as stack:
                while self._runs:
                    stack.callback(self._close, self._runs.popitem()[1])
        except Exception as error:
            if not self._is_off:
                self._switch_off(error)

    def _cannot_start(self, error: Exception) -> JaxloraError:
        if isinstance(error, JaxloraError):
            return error
        return ConfigError(
            f"report_to: {self._name} cannot be used ({type(error).__name__}: "
            f"{one_line(error)}). Correct its settings, or leave {self._name} out of "
            "report_to."
        )

    def _switch_off(self, error: Exception) -> None:
        self._is_off = True
        logger.warning(
            "report_to: %s has failed (%s: %s). It gets nothing more, and its last "
            "values may be missing. The run goes on; metrics.jsonl has all values.",
            self._name,
            type(error).__name__,
            one_line(error),
        )


class TensorBoard(Tracker):
    """Writes each job's metrics and settings to a folder of its own.

    `tensorboard --logdir` shows each folder as a run, so the curves of all jobs are in
    one chart. The folder itself holds the metrics of the whole run.
    """

    def _follow(self, event: Event) -> None:
        if isinstance(event, WindowEvent):
            self._report("", run_metrics(event), event.round)
        super()._follow(event)

    def _open(self, job: str, settings: dict[str, Any], step: int) -> "Board":
        from jaxlora.trackers.tensorboard import Board  # its package is large

        folder = self._folder / "tensorboard" / job
        return Board(folder, settings, (TRAIN_LOSS, EVAL_LOSS), first_step=step)

    def _send(self, run: "Board", values: dict[str, Any], step: int) -> None:
        run.add(values, step)

    def _table(self, row: dict[str, Any]) -> str:
        return f"{row['prompt']}\n\n---\n\n{row['text']}"

    def _close(self, run: "Board") -> None:
        run.close()


class Wandb(Tracker):
    """Sends each job's metrics and texts to a run of Weights & Biases.

    The environment variables of W&B choose the rest: WANDB_PROJECT, WANDB_ENTITY,
    WANDB_MODE=offline. A resumed job continues its run, as the run's id follows from
    the folder's path and the job's name.
    """

    def _open(self, job: str, settings: dict[str, Any], step: int) -> Any:
        import wandb

        identity = f"{self._folder.absolute()}/{job}".encode()
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxlora"),
            group=self._folder.name,
            name=job,
            id=hashlib.sha256(identity).hexdigest()[:16],
            resume="allow",
            reinit="create_new",  # the jobs' runs are open at the same time
            config=settings,
            dir=str(self._folder),
        )
        # Steps that are done again after a kill are sent again, which W&B accepts for
        # a metric but not for its own count of steps.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _send(self, run: Any, values: dict[str, Any], step: int) -> None:
        run.log({**values, "step": step})

    def _table(self, row: dict[str, Any]) -> Any:
        import wandb

        return wandb.Table(columns=list(row), data=[list(row.values())])

    def _close(self, run: Any) -> None:
        run.finish()


class Trackio(Tracker):
    """Sends each job's metrics and texts to a run of Trackio.

    TRACKIO_PROJECT names the project, and TRACKIO_DIR the local folder. A resumed job
    continues its run.
    """

    def _open(self, job: str, settings: dict[str, Any], step: int) -> Any:
        import trackio

        return trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "jaxlora"),
            name=f"{self._folder.name}/{job}",
            group=self._folder.name,
            resume="allow",
            config=settings,
            embed=False,
        )

    def _send(self, run: Any, values: dict[str, Any], step: int) -> None:
        run.log(values, step=step)

    def _table(self, row: dict[str, Any]) -> Any:
        import trackio

        return trackio.Table(data=[row])

    def _close(self, run: Any) -> None:
        run.finish()


_TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
_EXTRAS = ("wandb", "trackio")  # packages that are extras of jaxlora


def check_installed(names: Iterable[str]) -> None:
    """Checks that the packages of some trackers are installed.

    Raises:
        ConfigError: One is missing.
    """
    for name in names:
        if name in _EXTRAS and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"report_to: {name} needs the package {name}, which is not installed. "
                f"Run: pip install 'jaxlora[{name}]'"
            )


def open_trackers(names: Iterable[str], folder: pathlib.Path) -> list[Tracker]:
    """Opens trackers by name, whose errors do not end the run once it has begun.

    Args:
        names: Names of trackers.
        folder: Folder of the run.
    """
    return [_TRACKERS[name](name, folder) for name in dict.fromkeys(names)]

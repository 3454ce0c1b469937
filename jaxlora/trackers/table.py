"""The experiment trackers that a run can report to, by the names in `report_to`.

A run goes on when a tracker fails, for example because the network is lost.
"""

import importlib
import importlib.util
import logging
import pathlib
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from jaxlora.errors import ConfigError, JaxloraError
from jaxlora.printable import one_line
from jaxlora.run.callback import Callback
from jaxlora.run.events import EvalEvent, Event, StepEvent, WindowEvent

logger = logging.getLogger(__name__)


@runtime_checkable
class Tracker(Protocol):
    """An experiment tracker of a run."""

    def on_event(self, event: Event) -> None:
        """Reports an event."""

    def close(self) -> None:
        """Sends what is left, and ends."""


class GuardedTracker(Callback):
    """Sends events to a tracker until it fails.

    If the first metrics cannot be sent, the run ends: a wrong key or folder is found
    at once, and nothing is lost yet. After that, an error is a warning, the tracker
    gets no more events, and the run goes on.
    """

    def __init__(self, name: str, tracker: Tracker):
        """Makes the object.

        Args:
            name: Name of the tracker in `report_to`.
            tracker: The tracker.
        """
        self._name, self._tracker = name, tracker
        self._has_sent = self._is_off = False

    def on_event(self, event: Event) -> None:
        """Sends an event, unless the tracker has failed.

        Raises:
            JaxloraError: The tracker fails before it has received any metrics.
        """
        if self._is_off:
            return
        try:
            self._tracker.on_event(event)
        except Exception as error:  # whatever the tracker's package raises
            if not self._has_sent:
                raise self._cannot_start(error) from error
            self._switch_off(error)
        has_metrics = isinstance(event, StepEvent | EvalEvent | WindowEvent)
        self._has_sent = self._has_sent or has_metrics

    def close(self) -> None:
        """Ends the tracker; an error is a warning, too."""
        try:
            self._tracker.close()
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


# The class of each tracker, in the module of that name, which is imported
# when it is used: its package may be large.
TRACKERS = {"tensorboard": "TensorBoard", "wandb": "Wandb", "trackio": "Trackio"}
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


def open_trackers(names: Iterable[str], folder: pathlib.Path) -> list[GuardedTracker]:
    """Opens trackers by name, whose errors do not end the run once it has begun.

    Args:
        names: Names of trackers.
        folder: Folder of the run.
    """
    return [GuardedTracker(name, _open(name, folder)) for name in dict.fromkeys(names)]


def _open(name: str, folder: pathlib.Path) -> Tracker:
    module = importlib.import_module(f"jaxlora.trackers.{name}")
    return getattr(module, TRACKERS[name])(folder)

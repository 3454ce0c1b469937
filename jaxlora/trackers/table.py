"""The experiment trackers that a run can report to, by the names in `report_to`."""

import importlib.util
import pathlib
from collections.abc import Iterable

from jaxlora.errors import ConfigError
from jaxlora.trackers.guard import GuardedTracker
from jaxlora.trackers.tensorboard import TensorBoard
from jaxlora.trackers.trackio import Trackio
from jaxlora.trackers.wandb import Wandb

TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
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
    return [GuardedTracker(n, TRACKERS[n](folder)) for n in dict.fromkeys(names)]

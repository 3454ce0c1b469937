"""The workers of a sweep, one for each group of devices, as the driver sees them."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxlora.sweeps.engine.messages import FromWorker, ToWorker


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A worker has ended, for whatever reason; nothing more comes from it.

    Attributes:
        reason: Text that says how it ended, as far as that is known.
    """

    reason: str


@runtime_checkable
class Workers(Protocol):
    """Starts workers and passes messages; one thread calls the methods.

    At most one worker of a group lives at any time.
    """

    def start(self, group: int, folder: pathlib.Path) -> bool:
        """Starts the worker of a group, unless its devices are not there now.

        Args:
            group: Number of the group.
            folder: Folder of its run, which is made, with the worker's log.

        Returns:
            Whether it was started.
        """

    def send(self, group: int, messages: Sequence[ToWorker]) -> None:
        """Sends messages, which are lost if the worker has ended."""

    def receive(self, timeout: float) -> list[tuple[int, FromWorker | Lost]]:
        """Returns what has come, by group, in order of arrival.

        Args:
            timeout: Seconds to wait if nothing has.
        """

    def interrupt(self, group: int) -> None:
        """Lets a worker write a checkpoint and end."""

    def kill(self, group: int) -> None:
        """Ends a worker at once; it is reported as lost."""

    def close(self) -> None:
        """Ends all workers at once."""

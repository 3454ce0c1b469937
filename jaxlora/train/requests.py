"""Requests to stop, pause and resume jobs while a run trains."""

import itertools
from collections.abc import Iterable

from jaxlora.distributed import processes
from jaxlora.run.saved_run import SavedRequests


class Requests:
    """The latest request for each job.

    Any thread may make requests, as each one is a single write to a dict. The thread
    that trains reads them between global batches. If several processes train the run,
    requests take effect when the processes `agree`, so that all of them act alike.

    Attributes:
        version: Changes with each request; if it does, there may be a new one.
    """

    def __init__(self):
        self._stopping: dict[str, str] = {}
        self._pausing: dict[str, str | None] = {}  # None: resumed
        is_alone = processes.count() == 1
        self._new_stopping = self._stopping if is_alone else {}
        self._new_pausing = self._pausing if is_alone else {}
        self._count = itertools.count(1)  # `next` of it is atomic
        self.version = 0

    def stop(self, name: str, reason: str) -> None:
        """Asks for a job to end after its current global batch."""
        self._new_stopping[name] = reason
        self.version = next(self._count)

    def pause(self, name: str, reason: str) -> None:
        """Asks for a job to leave its slot after its current global batch."""
        self._new_pausing[name] = reason
        self.version = next(self._count)

    def resume(self, name: str) -> None:
        """Allows a paused job to continue."""
        self._new_pausing[name] = None
        self.version = next(self._count)

    def agree(self) -> None:
        """Puts the requests made on any process into force on all of them."""
        if processes.count() == 1:
            return
        new = _taken(self._new_stopping), _taken(self._new_pausing)
        for stopping, pausing in processes.gather(new):
            self._stopping |= stopping
            self._pausing |= pausing
        self.version = next(self._count)

    def stop_reason(self, name: str) -> str | None:
        """Returns why a job was asked to stop; None if it was not."""
        return self._stopping.get(name)

    def pause_reason(self, name: str) -> str | None:
        """Returns why a job was asked to pause; None if it may run."""
        return self._pausing.get(name)

    def saved(self, names: Iterable[str]) -> SavedRequests:
        """Returns the requests that are in force for jobs of these names."""
        stopping, pausing = dict(self._stopping), dict(self._pausing)
        return SavedRequests(
            stopping={n: why for n in names if (why := stopping.get(n)) is not None},
            pausing={n: why for n in names if (why := pausing.get(n)) is not None},
        )

    def restore(self, saved: SavedRequests) -> None:
        """Adds saved requests; those made since then take precedence."""
        # In place, as a single process makes its requests in these dicts.
        for name, reason in saved.stopping.items():
            self._stopping.setdefault(name, reason)
        for name, reason in saved.pausing.items():
            self._pausing.setdefault(name, reason)


def _taken[T](requests: dict[str, T]) -> dict[str, T]:
    """Empties a dict to which other threads may add, and returns what it held."""
    return {name: requests.pop(name) for name in list(requests)}

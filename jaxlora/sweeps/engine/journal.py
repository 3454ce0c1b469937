"""Write-ahead journal: events of a sweep reach the disk before they take effect.

So after a kill at any time, nothing that a worker was told is missing in the ledger.
"""

from typing import Any

from jaxlora.sweeps.engine.ledger import Ledger
from jaxlora.sweeps.engine.messages import ToWorker
from jaxlora.sweeps.engine.state import Record, SweepState
from jaxlora.sweeps.engine.workers import Workers


class Journal:
    """Keeps records and messages until `flush`."""

    def __init__(self, state: SweepState, ledger: Ledger, workers: Workers):
        """Makes the object; nothing is kept.

        Args:
            state: Follows the records at once.
            ledger: Gets them.
            workers: Get the messages.
        """
        self._state, self._ledger, self._workers = state, ledger, workers
        self._records: list[Record] = []
        self._outbox: dict[int, list[ToWorker]] = {}

    def record(self, kind: str, **values: Any) -> None:
        """Follows a record, and keeps it."""
        record = {"kind": kind, **values}
        self._state.apply(record)
        self.keep(record)

    def keep(self, record: Record) -> None:
        """Keeps a record that the state has followed."""
        self._records.append(record)

    def send(self, group: int, *messages: ToWorker) -> None:
        """Sends messages to the worker of a group when the records are on the disk."""
        self._outbox.setdefault(group, []).extend(messages)

    def flush(self) -> None:
        """Writes the records, and then lets others know."""
        self._ledger.append(self._records)
        self._records = []
        outbox, self._outbox = self._outbox, {}
        for group, messages in outbox.items():
            self._workers.send(group, messages)

    def forget(self, group: int) -> None:
        """Drops the messages to a worker that has ended."""
        self._outbox.pop(group, None)

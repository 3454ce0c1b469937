"""The jobs of a plan, in the order in which they fill slots."""

import bisect
import dataclasses
import heapq
from collections.abc import Iterator, Sequence

from jaxlora.scheduler.windows.cursor import BatchCursor

# Jobs are in descending order of priority; those in the middle of a batch come first,
# then the most urgent ones, and equal ones in the order in which they were added.
_Key = tuple[int, bool, float, int]


class JobQueue:
    """Progress of many jobs. To fill a slot looks at few of them, however many exist.

    A copy shares all that has not changed, so planning can try several ways to go on.

    Attributes:
        index_of: Index of each job, by its number.
    """

    def __init__(self):
        """Starts without jobs."""
        self.index_of: dict[int, int] = {}  # shared by all copies, as are those added
        self._added: list[BatchCursor] = []
        self._changed: dict[int, BatchCursor] = {}  # replaces those in `_added`
        self._ready: list[_Key] = []
        self._waiting: list[tuple[int, _Key]] = []  # a heap, by the first slot

    def __bool__(self) -> bool:
        """Whether a job can run, now or in a later slot."""
        return bool(self._ready or self._waiting)

    def __len__(self) -> int:
        """Number of jobs that can run, now or in a later slot."""
        return len(self._ready) + len(self._waiting)

    def __getitem__(self, index: int) -> BatchCursor:
        return self._changed.get(index) or self._added[index]

    def copy(self) -> "JobQueue":
        """Returns a copy that advances independently."""
        new = JobQueue()
        new.index_of = self.index_of
        new._added = self._added
        new._changed = self._changed.copy()
        new._ready = self._ready.copy()
        new._waiting = self._waiting.copy()
        return new

    def add(self, job: BatchCursor) -> None:
        """Adds a job that has batches."""
        index = len(self._added)
        self.index_of[job.job] = index
        self._added.append(job)
        self._insert(index, job)

    def replace(self, index: int, **fields) -> None:
        """Replaces fields of a job's cursor."""
        old = self[index]
        self._remove(index, old)
        self._changed[index] = new = dataclasses.replace(old, **fields)
        self._insert(index, new)

    def first(self, slot: int, num: int) -> list[int]:
        """Returns the indices of the first `num` jobs that may run in a slot."""
        while self._waiting and self._waiting[0][0] <= slot:
            bisect.insort(self._ready, heapq.heappop(self._waiting)[1])
        return [key[-1] for key in self._ready[:num]]

    def running(self) -> list[tuple[int, BatchCursor]]:
        """Returns the jobs that can run, with their indices."""
        keys = self._ready + [key for _, key in self._waiting]
        return [(key[-1], self[key[-1]]) for key in keys]

    def take(self, index: int, chosen: Sequence[int], slot: int, distance: int) -> None:
        """Plans items of a job for a slot."""
        old = self[index]
        self._remove(index, old)
        self._changed[index] = new = old.after(chosen, slot, distance)
        self._insert(index, new)

    def changed(self) -> Iterator[tuple[int, BatchCursor]]:
        """Yields the jobs that changed since the last call of `settle`."""
        yield from sorted(self._changed.items())

    def settle(self) -> None:
        """Makes the changes permanent. Copies must not be used any more."""
        for index, job in self._changed.items():
            self._added[index] = job
        self._changed = {}

    def _insert(self, index: int, job: BatchCursor) -> None:
        if not job.can_run:
            return
        key = _key(index, job)
        if job.is_started:
            bisect.insort(self._ready, key)
        else:
            heapq.heappush(self._waiting, (job.ready, key))

    def _remove(self, index: int, job: BatchCursor) -> None:
        if not job.can_run:
            return
        key = _key(index, job)
        place = bisect.bisect_left(self._ready, key)
        if place < len(self._ready) and self._ready[place] == key:
            del self._ready[place]
        else:
            self._waiting.remove((job.ready, key))
            heapq.heapify(self._waiting)


def _key(index: int, job: BatchCursor) -> _Key:
    return -job.priority, not job.is_started, -job.urgency, index

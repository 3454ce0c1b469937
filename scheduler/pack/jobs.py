"""The jobs of a plan: their global batches, and how far planning has progressed."""

import bisect
import dataclasses
import heapq
from collections.abc import Iterable, Sequence

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes
from jaxlora.scheduler.types import Limits, Sample, batches_by_job, check_fits

# A sample and what it adds to a microbatch: (work, tokens, sample).
Item = tuple[int, int, Sample]


@dataclasses.dataclass(frozen=True, slots=True)
class WorkModel:
    """Converts sample lengths to work, a number of tokens of equal cost.

    The cost of a squared length is counted as additional tokens.

    Attributes:
        square_in_tokens: Cost of a squared length of 1, relative to that of a token.
    """

    square_in_tokens: float

    @classmethod
    def from_cost(cls, cost: CostModel) -> "WorkModel":
        """Derives the model from the costs of all passes of all stages."""
        passes = [p for s in cost.stages for p in (s.forward, s.backward)]
        per_token = sum(p.per_token for p in passes)
        per_square = sum(p.per_square for p in passes)
        # A bucket costs the same however it is filled, so only tokens count.
        return cls(per_square / per_token if per_token and not cost.buckets else 0.0)

    def item(self, sample: Sample) -> Item:
        """Returns a sample with its work and its tokens."""
        n = int(sample.num_tokens)  # bit sets need Python integers
        return n + round(self.square_in_tokens * n * n), n, sample


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobBatches:
    """The global batches of a job, which are read as planning proceeds.

    Attributes:
        batches: Samples of each global batch, in order.
        num_batches: Number of batches.
        batch_tokens: Mean number of tokens in a batch, which may be an estimate.
        is_started: Whether some samples of the first batch are in earlier ticks;
            `batches` then begins with the rest of it.
        ready: First tick in which the first batch may run.
        urgency_per_batch: How much each batch that is left adds to the job's urgency.
            The most urgent job comes first. None: the ticks that a batch takes, so that
            the job that needs the most ticks comes first.
        first_urgency: The part of its urgency that does not depend on the batches left.
        priority: Jobs of higher priority come first, however urgent others are.
    """

    batches: Iterable[Sequence[Sample]]
    num_batches: int
    batch_tokens: float
    is_started: bool = False
    ready: int = 0
    urgency_per_batch: float | None = None
    first_urgency: float = 0.0
    priority: int = 0


def job_batches(samples: Iterable[Sample]) -> list[JobBatches]:
    """Groups samples by job, in ascending order of jobs."""
    return [
        JobBatches(
            batches=batches,
            num_batches=len(batches),
            batch_tokens=sum(s.num_tokens for b in batches for s in b) / len(batches),
        )
        for _, batches in sorted(batches_by_job(samples).items())
    ]


class BatchSource:
    """Reads the global batches of one job, only as far as planning looks ahead."""

    def __init__(
        self, batches: Iterable[Sequence[Sample]], work: WorkModel, limits: Limits
    ):
        """Starts before the first batch."""
        self._batches, self._work, self._limits = iter(batches), work, limits
        self._items: list[list[Item]] = []

    def batch(self, number: int) -> list[Item]:
        """Returns the items of the batch in descending order of work.

        Args:
            number: Position of the batch, from 0. There are no items after the last
                batch.

        Raises:
            ValueError: The batch has a sample that is longer than the capacity.
        """
        while len(self._items) <= number:
            batch = next(self._batches, None)
            if batch is None:
                return []
            assert batch, "a global batch has at least one sample"
            check_fits(batch, self._limits)
            items = [self._work.item(s) for s in batch]
            items.sort(key=lambda i: (-i[0], i[2].index))
            self._items.append(items)
        return self._items[number]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchCursor:
    """The position of planning in one job.

    Attributes:
        of: The job, as planning begins.
        source: Reads its batches.
        urgency_per_batch: How much each batch that is left adds to the urgency.
        number: Position of the current batch in the source.
        items: Items of the current batch that are not planned yet, in descending order
            of work.
        is_started: Whether some items of the current batch are planned.
        ready: First tick in which the current batch may run.
    """

    of: JobBatches
    source: BatchSource
    urgency_per_batch: float
    items: list[Item]
    number: int = 0
    is_started: bool = False
    ready: int = 0

    @property
    def urgency(self) -> float:
        """How early the job fills ticks, relative to the others."""
        num_left = self.of.num_batches - self.number
        return self.of.first_urgency + num_left * self.urgency_per_batch

    @property
    def job(self) -> int:
        """Number of the job."""
        return self.items[0][2].owner

    def after(self, chosen: Sequence[int], tick: int, distance: int) -> "BatchCursor":
        """Returns the cursor after some items are planned for a tick.

        After the last item of a batch, it is at the next batch.
        """
        if len(chosen) == len(self.items):
            return dataclasses.replace(
                self,
                items=self.source.batch(self.number + 1),
                number=self.number + 1,
                is_started=False,
                ready=tick + distance,
            )
        taken = set(chosen)
        items = [item for i, item in enumerate(self.items) if i not in taken]
        return dataclasses.replace(self, items=items, is_started=True)


# Jobs are in descending order of priority; those in the middle of a batch come first,
# then the most urgent ones, and equal ones in the order in which they were added.
_Key = tuple[int, bool, float, int]


class JobQueue:
    """The progress of many jobs, in the order in which they fill ticks.

    Filling a tick looks at few of them, however many there are. Planning tries several
    ways to continue on copies of the queue.
    """

    def __init__(self):
        """Starts without jobs."""
        self._jobs: list[BatchCursor] = []
        self._ready: list[_Key] = []
        self._waiting: list[tuple[int, _Key]] = []  # a heap, by the first tick

    @classmethod
    def of(
        cls, jobs: Iterable[JobBatches], limits: Limits, lanes: Lanes, cost: CostModel
    ) -> "JobQueue":
        """Returns a queue of some jobs."""
        work, queue = WorkModel.from_cost(cost), cls()
        tokens, distance = lanes.tick_tokens(limits.capacity), lanes.pipeline.distance
        for job in jobs:
            source = BatchSource(job.batches, work, limits)
            each = ticks_per_batch(job.batch_tokens, tokens, distance)
            queue.add(
                BatchCursor(
                    of=job,
                    source=source,
                    urgency_per_batch=job.urgency_per_batch or each,
                    items=source.batch(0),
                    is_started=job.is_started,
                    ready=job.ready,
                )
            )
        return queue

    def __bool__(self) -> bool:
        """Whether a job has items to run, now or in a later tick."""
        return bool(self._ready or self._waiting)

    def __len__(self) -> int:
        """Number of jobs that have items to run."""
        return len(self._ready) + len(self._waiting)

    def __getitem__(self, index: int) -> BatchCursor:
        return self._jobs[index]

    def copy(self) -> "JobQueue":
        """Returns a copy that advances independently."""
        new = JobQueue()
        new._jobs = self._jobs.copy()
        new._ready = self._ready.copy()
        new._waiting = self._waiting.copy()
        return new

    def add(self, job: BatchCursor) -> None:
        """Adds a job."""
        self._jobs.append(job)
        self._insert(len(self._jobs) - 1)

    def first(self, tick: int, num: int) -> list[int]:
        """Returns the indices of the first `num` jobs that may run in a tick."""
        while self._waiting and self._waiting[0][0] <= tick:
            bisect.insort(self._ready, heapq.heappop(self._waiting)[1])
        return [key[-1] for key in self._ready[:num]]

    @property
    def alone(self) -> int | None:
        """Index of the only job left if it is between batches; None otherwise."""
        if len(self) != 1:
            return None
        (key,) = self._ready or [key for _, key in self._waiting]
        return None if self._jobs[key[-1]].is_started else key[-1]

    def take(self, index: int, chosen: Sequence[int], tick: int, distance: int) -> None:
        """Plans items of a job for a tick."""
        old = self._jobs[index]
        key = _key(index, old)
        place = bisect.bisect_left(self._ready, key)
        if place < len(self._ready) and self._ready[place] == key:
            del self._ready[place]
        else:
            self._waiting.remove((old.ready, key))
            heapq.heapify(self._waiting)
        self._jobs[index] = old.after(chosen, tick, distance)
        self._insert(index)

    def ready(self) -> dict[int, int]:
        """Returns the first tick in which each job may run, by the job's number."""
        return {job.job: job.ready for job in self._jobs if job.items}

    def _insert(self, index: int) -> None:
        job = self._jobs[index]
        if not job.items:
            return
        key = _key(index, job)
        if job.is_started:
            bisect.insort(self._ready, key)
        else:
            heapq.heappush(self._waiting, (job.ready, key))


def _key(index: int, job: BatchCursor) -> _Key:
    return -job.of.priority, not job.is_started, -job.urgency, index


def ticks_per_batch(batch_tokens: float, tick_tokens: float, distance: int) -> float:
    """Estimates the ticks from the start of a job's batch to that of its next one."""
    return max(1.0, batch_tokens / tick_tokens) + distance - 1

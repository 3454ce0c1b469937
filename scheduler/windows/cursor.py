"""The global batches of a job, and how far planning has progressed in them."""

import dataclasses
from collections.abc import Iterable, Sequence

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.types import Limits, Sample, check_fits

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


class BatchSource:
    """Reads the global batches of one job, only as far as planning looks ahead.

    Attributes:
        job: Number of the job, known once the first batch is read.
    """

    def __init__(
        self, batches: Iterable[Sequence[Sample]], work: WorkModel, limits: Limits
    ):
        """Starts before the first batch.

        Args:
            batches: The global batches, in order.
            work: Converts lengths to work.
            limits: Capacity and block size.
        """
        self.job: int | None = None
        self._batches = iter(batches)
        self._work = work
        self._limits = limits
        self._items: dict[int, list[Item]] = {}
        self._num_read = 0
        self._last_batch = -1

    def batch(self, number: int) -> list[Item]:
        """Returns the items of the batch in descending order of work.

        Args:
            number: Position of the batch, from 0. After the last one there are no
                items.

        Raises:
            ValueError: A batch is empty, mixes jobs or batches, comes out of order, or
                has a sample that is longer than the capacity.
        """
        while self._num_read <= number:
            batch = next(self._batches, None)
            if batch is None:
                return []
            self._check(batch)
            items = [self._work.item(s) for s in batch]
            items.sort(key=lambda i: (-i[0], i[2].index))
            self._items[self._num_read] = items
            self._num_read += 1
        return self._items[number]

    def _check(self, batch: Sequence[Sample]) -> None:
        check_fits(batch, self._limits)
        if len({(s.owner, s.batch) for s in batch}) != 1:
            raise ValueError(
                f"batch {self._num_read} of job {self.job} has {len(batch)} samples "
                f"with the (job, batch) {sorted({(s.owner, s.batch) for s in batch})}. "
                "A global batch needs at least one sample, all of the same job and "
                "batch."
            )
        job, number = batch[0].owner, batch[0].batch
        if self.job is not None and (job != self.job or number <= self._last_batch):
            raise ValueError(
                f"batch {number} of job {job} follows batch {self._last_batch} of job "
                f"{self.job}. Give the batches of one job in ascending order."
            )
        self.job, self._last_batch = job, number

    def forget_before(self, number: int) -> None:
        """Frees the batches before a number."""
        for old in [n for n in self._items if n < number]:
            del self._items[old]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchCursor:
    """The position of planning in one job.

    Attributes:
        source: The job's batches.
        num_batches: Number of the job's batches.
        urgency_per_batch: How much each batch that is left adds to the urgency: the
            estimated number of slots that it takes, for example.
        first_urgency: What is added to the urgency in any case.
        number: Position of the current batch in the source.
        items: Items of the current batch that are not planned yet, in descending order
            of work.
        is_started: Whether some items of the current batch are planned.
        is_paused: Whether the job pauses after the current batch.
        ready: First slot in which the current batch may run.
        priority: Jobs of higher priority come first, however urgent others are.
    """

    source: BatchSource
    num_batches: int
    urgency_per_batch: float
    number: int
    items: list[Item]
    is_started: bool = False
    is_paused: bool = False
    ready: int = 0
    first_urgency: float = 0.0
    priority: int = 0

    @classmethod
    def at_start(
        cls,
        source: BatchSource,
        *,
        num_batches: int,
        urgency_per_batch: float,
        is_started: bool = False,
        ready: int = 0,
        first_urgency: float = 0.0,
        priority: int = 0,
    ) -> "BatchCursor":
        """Returns the cursor of the first batch of a source."""
        return cls(
            source=source,
            num_batches=num_batches,
            urgency_per_batch=urgency_per_batch,
            first_urgency=first_urgency,
            number=0,
            items=source.batch(0),
            is_started=is_started,
            ready=ready,
            priority=priority,
        )

    @property
    def urgency(self) -> float:
        """How early the job fills slots, relative to the others."""
        num_left = self.num_batches - self.number
        return self.first_urgency + num_left * self.urgency_per_batch

    @property
    def can_run(self) -> bool:
        """Whether the job has items to run. A paused job only completes its batch."""
        return bool(self.items) and (self.is_started or not self.is_paused)

    @property
    def job(self) -> int:
        """Number of the job."""
        return self.items[0][2].owner

    @property
    def batch(self) -> int:
        """Number of the current global batch."""
        return self.items[0][2].batch

    def after(self, chosen: Sequence[int], slot: int, distance: int) -> "BatchCursor":
        """Returns the cursor after some items are planned for a slot.

        After the last item of a batch, it is at the next batch.
        """
        if len(chosen) == len(self.items):
            items, number = self.source.batch(self.number + 1), self.number + 1
            is_started, ready = False, slot + distance
        else:
            taken = set(chosen)
            items = [item for i, item in enumerate(self.items) if i not in taken]
            number, is_started, ready = self.number, True, self.ready
        return BatchCursor(
            source=self.source,
            num_batches=self.num_batches,
            urgency_per_batch=self.urgency_per_batch,
            first_urgency=self.first_urgency,
            number=number,
            items=items,
            is_started=is_started,
            is_paused=self.is_paused,
            ready=ready,
            priority=self.priority,
        )

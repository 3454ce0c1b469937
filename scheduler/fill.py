"""Fills the microbatch of one slot, and tracks how far each job has progressed."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.types import Limits, Sample, check_fits

_MAX_SUBSETS = 6

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


class BatchCursor:
    """The position of planning in one job.

    Attributes:
        source: The job's batches.
        num_batches: Number of the job's batches.
        slots_per_batch: Estimated number of slots that a batch takes.
        number: Position of the current batch in the source.
        items: Items of the current batch that are not planned yet.
        work: Total work of these items.
        is_started: Whether some items of the current batch are planned.
        is_paused: Whether the job pauses after the current batch.
        ready: First slot in which the current batch may run.
        urgency: Estimated number of slots that the job still needs.
    """

    __slots__ = (
        "is_paused", "is_started", "items", "num_batches", "number", "ready",
        "slots_per_batch", "source", "urgency", "work",
    )  # fmt: skip

    def __init__(
        self,
        source: BatchSource,
        *,
        num_batches: int,
        slots_per_batch: float,
        is_started: bool = False,
        ready: int = 0,
    ):
        """Starts at the first batch of the source, or in it."""
        self.source = source
        self.num_batches = num_batches
        self.slots_per_batch = slots_per_batch
        self.is_paused = False
        self._enter_batch(0)
        self.is_started, self.ready = is_started, ready

    def _enter_batch(self, number: int) -> None:
        self.number = number
        self.items: list[Item] = self.source.batch(number)
        self.work = sum(i[0] for i in self.items)
        self.is_started = False
        self.urgency = (self.num_batches - number) * self.slots_per_batch

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

    def copy(self) -> "BatchCursor":
        """Returns a copy that shares the source."""
        new = BatchCursor.__new__(BatchCursor)
        for name in BatchCursor.__slots__:
            setattr(new, name, getattr(self, name))
        return new

    def take(self, chosen: list[int], slot: int, distance: int) -> list[Item]:
        """Removes items for a slot, and enters the next batch after the last item."""
        assert self.items
        if len(chosen) == len(self.items):
            taken = self.items
            self._enter_batch(self.number + 1)
            self.ready = slot + distance
            return taken
        taken = [self.items[i] for i in chosen]
        indices = set(chosen)
        self.items = [item for i, item in enumerate(self.items) if i not in indices]
        self.work -= sum(i[0] for i in taken)
        self.is_started = True
        return taken


def fill_slot(
    jobs: list[BatchCursor], slot: int, target: int, limits: Limits, distance: int
) -> list[Item]:
    """Fills the microbatch of a slot with up to about `target` work.

    Jobs in the middle of a batch come first, then the jobs that need the most slots.

    Args:
        jobs: Progress of each job, which is advanced.
        slot: Number of the slot.
        target: Work to fill the slot with. A first item is placed even if it exceeds
            the target.
        limits: Capacity and block size.
        distance: Distance of the pipeline.

    Returns:
        The items of the microbatch; none if no job may run in this slot.
    """
    ready = [job for job in jobs if job.ready <= slot and job.can_run]
    ready.sort(key=lambda job: (not job.is_started, -job.urgency))
    out: list[Item] = []
    work, tokens = 0, 0
    for job in ready:
        room, token_room = target - work, limits.capacity - tokens
        if out and min(room, token_room) < limits.block_tokens:
            break  # the part of a job takes at least one block
        if out and job.items[-1][0] > room:
            continue  # not even the job's smallest item fits
        chosen = _choose(job.items, room, token_room, limits, must_choose=not out)
        if chosen:
            taken = job.take(chosen, slot, distance)
            real = sum(i[1] for i in taken)
            tokens += limits.padded(real)
            work += sum(i[0] for i in taken) + limits.padded(real) - real
            out += taken
    return out


def _choose(
    items: list[Item], room: int, token_room: int, limits: Limits, *, must_choose: bool
) -> list[int]:
    """Chooses the items of one job for a microbatch.

    Args:
        items: The job's items, in descending order of work.
        room: Work that the items may add, including padding.
        token_room: Tokens that the items may add, including padding.
        limits: Block size.
        must_choose: Whether to choose an item even if none fits in `room`.

    Returns:
        Indices of the items.
    """

    def fits(chosen: Sequence[int]) -> bool:
        tokens = work = 0
        for i in chosen:
            work += items[i][0]
            tokens += items[i][1]
        padded = limits.padded(tokens)
        return padded <= token_room and work + padded - tokens <= room

    everything = range(len(items))
    if fits(everything):
        return list(everything)
    weights = [i[0] for i in items]
    for chosen in itertools.islice(best_subsets(weights, room), _MAX_SUBSETS):
        if fits(chosen):
            return chosen
    # Padding to blocks may make even the heaviest subset too large. A subset that is
    # lighter by a block always fits.
    weights = [i[1] for i in items] if room > token_room else weights
    subsets = best_subsets(weights, min(token_room, room - limits.block_tokens + 1))
    chosen = next(subsets, [])
    if not chosen and must_choose:
        # Every sample exceeds the target, so the microbatch is a single sample.
        return [0]
    return chosen


def best_subsets(weights: Sequence[int], room: int) -> Iterator[list[int]]:
    """Yields subsets of items whose total weight is at most `room`, the heaviest first.

    Subset sum is solved exactly with bit sets: bit w of an integer is 1 if the
    total weight w exists.

    It yields one nonempty subset, as indices, for each total weight. Among equal totals
    it prefers early items. Callers sort the items by descending weight, because small
    items are easier to place later.

    Args:
        weights: Positive weights of the items.
        room: Maximum total weight of a subset.
    """
    if room <= 0:
        return
    mask = (1 << (room + 1)) - 1
    reach = [1]
    for weight in weights:
        reach.append((reach[-1] | reach[-1] << weight) & mask)
        if reach[-1] >> room:  # a subset fills the room, so no item can improve it
            break
    sums = reach[-1]
    while True:
        total = sums.bit_length() - 1
        if total <= 0:
            return
        yield _backtrack(weights, reach, total)
        sums ^= 1 << total


def _backtrack(weights: Sequence[int], reach: list[int], total: int) -> list[int]:
    chosen = []
    for i in range(len(reach) - 2, -1, -1):
        if not total:
            break
        if not reach[i] >> total & 1:  # the total is impossible without item i
            chosen.append(i)
            total -= weights[i]
    return chosen

"""Where each job stands while a schedule grows, slot by slot."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.subset_sum import best_subsets
from jaxlora.scheduler.types import Limits, Sample, check_fits

SUBSETS_TRIED = 6

# A sample with what it adds to a microbatch: (work, tokens, sample). Work is in tokens
# too: what its squared length costs is counted as more tokens.
Item = tuple[int, int, Sample]


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Turns lengths into work: the tokens that would cost as much without squares."""

    square_in_tokens: float

    @classmethod
    def of(cls, cost: CostModel) -> "Work":
        passes = [p for s in cost.stages for p in (s.forward, s.backward)]
        per_token = sum(p.per_token for p in passes)
        per_square = sum(p.per_square for p in passes)
        # A compiled shape is to be filled with tokens, whatever their squares.
        return cls(per_square / per_token if per_token and not cost.buckets else 0.0)

    def item(self, sample: Sample) -> Item:
        n = int(sample.num_tokens)  # the bit sets need no NumPy number
        return n + round(self.square_in_tokens * n * n), n, sample


class Source:
    """The global batches of one job, read only as far as planning looks ahead."""

    def __init__(
        self,
        batches: Iterable[Sequence[Sample]],
        work: Work,
        limits: Limits,
    ):
        self._batches = iter(batches)
        self._held: dict[int, list[Item]] = {}
        self._read = 0
        self._last = -1
        self.job: int | None = None  # known from the first batch on
        self._work = work
        self._limits = limits

    def batch(self, number: int) -> list[Item]:
        """Items of a batch, dearest first; none after the last batch."""
        while self._read <= number:
            batch = next(self._batches, None)
            if batch is None:
                return []
            self._check(batch)
            items = [self._work.item(s) for s in batch]
            items.sort(key=lambda i: (-i[0], i[2].index))
            self._held[self._read] = items
            self._read += 1
        return self._held[number]

    def _check(self, batch: Sequence[Sample]) -> None:
        check_fits(batch, self._limits)
        if len({(s.job, s.batch) for s in batch}) != 1:
            raise ValueError(
                f"batch {self._read} of job {self.job} has {len(batch)} samples of the "
                f"(job, batch) {sorted({(s.job, s.batch) for s in batch})}: a global "
                "batch has at least one sample, all of one job and batch."
            )
        job, number = batch[0].job, batch[0].batch
        if self.job is not None and (job != self.job or number <= self._last):
            raise ValueError(
                f"batch {number} of job {job} follows batch {self._last} of job "
                f"{self.job}: a job's batches must ascend."
            )
        self.job, self._last = job, number

    @property
    def num_held(self) -> int:
        return len(self._held)

    def forget_before(self, number: int) -> None:
        for old in [n for n in self._held if n < number]:
            del self._held[old]


class Progress:
    """How far a job has come; `items` are what is left of its current batch."""

    __slots__ = (
        "items", "num_batches", "number", "paused", "ready", "slots_a_batch", "source",
        "started", "urgency", "work",
    )  # fmt: skip

    def __init__(self, source: Source, *, num_batches: int, slots_a_batch: float):
        self.source = source
        self.num_batches = num_batches
        self.slots_a_batch = slots_a_batch
        self.ready = 0
        self.paused = False
        self._enter(0)

    def _enter(self, number: int) -> None:
        self.number = number
        self.items: list[Item] = self.source.batch(number)
        self.work = sum(i[0] for i in self.items)
        self.started = False
        # Slots that the job still needs at least, about.
        self.urgency = (self.num_batches - number) * self.slots_a_batch

    @property
    def runs(self) -> bool:
        """Whether it has items to run; a paused job only those of a started batch."""
        return bool(self.items) and (self.started or not self.paused)

    @property
    def job(self) -> int:
        return self.items[0][2].job

    @property
    def batch(self) -> int:
        """The global batch that `items` are of."""
        return self.items[0][2].batch

    def copy(self) -> "Progress":
        new = Progress.__new__(Progress)
        for name in Progress.__slots__:
            setattr(new, name, getattr(self, name))
        return new

    def take(self, chosen: list[int], slot: int, distance: int) -> list[Item]:
        """Moves items into the microbatch of a slot, and on to the next batch."""
        assert self.items
        if len(chosen) == len(self.items):
            taken = self.items
            self._enter(self.number + 1)
            self.ready = slot + distance
            return taken
        taken = [self.items[i] for i in chosen]
        out = set(chosen)
        self.items = [item for i, item in enumerate(self.items) if i not in out]
        self.work -= sum(i[0] for i in taken)
        self.started = True
        return taken


def fill_slot(
    jobs: list[Progress], slot: int, target: int, limits: Limits, distance: int
) -> list[Item]:
    """Fills the microbatch of a slot up to about `target` work; empty if none may run.

    Jobs that are in the middle of a batch go first, then those that need most slots.
    """
    able = [x for x in jobs if x.ready <= slot and x.runs]
    able.sort(key=lambda x: (not x.started, -x.urgency))
    out: list[Item] = []
    work, tokens = 0, 0
    for x in able:
        room, hard = target - work, limits.capacity - tokens
        if out and min(room, hard) < limits.block_tokens:
            break  # no job's part is less than a block
        if out and x.items[-1][0] > room:
            continue  # not even its smallest
        chosen = _choose(x.items, room, hard, limits, not out)
        if chosen:
            taken = x.take(chosen, slot, distance)
            real = sum(i[1] for i in taken)
            tokens += limits.padded(real)
            work += sum(i[0] for i in taken) + limits.padded(real) - real
            out += taken
    return out


def _choose(
    items: list[Item], room: int, hard: int, limits: Limits, force: bool
) -> list[int]:
    """Indices of items of one job for a room of work and a hard one of tokens."""

    def fits(chosen: Sequence[int]) -> bool:
        tokens = work = 0
        for i in chosen:
            work += items[i][0]
            tokens += items[i][1]
        padded = limits.padded(tokens)
        return padded <= hard and work + padded - tokens <= room

    everything = range(len(items))
    if fits(everything):
        return list(everything)
    # The heaviest subset need not fit once it is padded to blocks; one a block lighter
    # does.
    weights = [i[0] for i in items]
    subsets = best_subsets(weights, room)
    for chosen in itertools.islice(subsets, SUBSETS_TRIED):
        if fits(chosen):
            return chosen
    weights = [i[1] for i in items] if room > hard else weights
    chosen = next(best_subsets(weights, min(hard, room - limits.block_tokens + 1)), [])
    if not chosen and force:
        # No sample is as small as the target: the microbatch is one sample.
        return [0]
    return chosen

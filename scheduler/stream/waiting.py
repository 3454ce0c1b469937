"""Fills microbatches from batches that wait, of tenants who share a device.

Later batches are not known yet. Each tenant gets the same number of tokens per unit of
its weight for as long as it has something to run. That is deficit round robin with the
account kept as a virtual time: padded tokens that have run, divided by the weight.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from jaxlora.scheduler.types import Limits, Microbatch, Sample, in_order

# Rows that a further microbatch costs beside its own, as a share of the largest one.
_LAUNCH = 1 / 16
# What it takes to bring an owner to the device, likewise.
_MOVE = 1 / 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class WaitingBatch:
    """Samples that wait for the same step of their owner.

    Attributes:
        tenant: Whose turn it takes.
        kind: Batches of one kind can share a microbatch.
        samples: The samples, all of one owner, which no other batch of the kind has.
        came: `FairQueue.num_rows` when the first sample of the batch came.
        has_begun: Whether samples of the batch have run already.
        is_near: Whether it can run at once; others first have to be brought to the
            device.
    """

    tenant: Hashable
    kind: Hashable
    samples: Sequence[Sample]
    came: int = 0
    has_begun: bool = False
    is_near: bool = True

    @property
    def owner(self) -> int:
        """The owner of the samples."""
        return self.samples[0].owner

    @functools.cached_property
    def num_tokens(self) -> int:
        """The tokens of all samples, without padding."""
        return sum(sample.num_tokens for sample in self.samples)

    @functools.cached_property
    def longest(self) -> int:
        """The tokens of the longest sample."""
        return max(sample.num_tokens for sample in self.samples)

    @functools.cached_property
    def shortest(self) -> int:
        """The tokens of the shortest sample."""
        return min(sample.num_tokens for sample in self.samples)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What runs next.

    Attributes:
        kind: The kind of its batches.
        microbatch: The samples.
        rows: Rows of the microbatch, one of the sizes.
    """

    kind: Hashable
    microbatch: Microbatch
    rows: int


class FairQueue:
    """Decides which samples run next.

    A tenant that is behind runs first. Tenants within a quantum of the one that is
    furthest behind count as equals, and among them batches go first that end with the
    microbatch, as the next step of their owner waits for that. The shares of tenants
    that always wait so differ by a quantum and a microbatch at most, at any time.

    Attributes:
        num_rows: Rows that have run, padding included.
    """

    def __init__(
        self,
        limits: Limits,
        sizes: Sequence[int],
        *,
        quantum: int | None = None,
        max_wait: int | None = None,
        weight_of: Callable[[Any], float] = lambda tenant: 1.0,
        most_owners_of: Callable[[Any], int | None] = lambda tenant: None,
    ):
        """Makes a queue whose tenants have run nothing.

        Args:
            limits: Block size, and numbers of samples and owners in a microbatch.
            sizes: The sizes that a microbatch can have, in tokens.
            quantum: Tokens per unit of weight by which equal tenants may differ; None:
                half the largest size.
            max_wait: A batch that has waited for so many rows, and for a whole round of
                all tenants, goes before its tenant's equals; None: twice the largest
                size.
            weight_of: Returns the weight of a tenant, unless `weigh` was called.
            most_owners_of: Returns the most owners of a tenant in a microbatch; None:
                any number.
        """
        self.num_rows = 0
        self._limits, self._sizes = limits, sorted(sizes)
        most = self._sizes[-1]
        self._quantum = most // 2 if quantum is None else quantum
        self._max_wait = 2 * most if max_wait is None else max_wait
        self._best = _best_sizes(self._sizes, limits.block_tokens)
        self._weights: dict[Hashable, float] = {}
        self._weight_of, self._most_owners_of = weight_of, most_owners_of
        # Virtual time of each tenant, unless it is less than any that counts.
        self._times: dict[Hashable, float] = {}
        self._least = 0.0  # that of the tenants who waited when a turn was chosen last
        self._active: set[Hashable] = set()

    def weigh(self, tenant: Hashable, weight: float) -> None:
        """Sets the weight of a tenant, a positive number."""
        assert weight > 0
        self._weights[tenant] = weight

    def weight(self, tenant: Hashable) -> float:
        """Returns the weight of a tenant."""
        return self._weights.get(tenant) or self._weight_of(tenant)

    def next(self, waiting: Iterable[WaitingBatch]) -> Turn:
        """Chooses what runs next, and counts it as run.

        Args:
            waiting: All batches that could run, with one sample or more each, none of
                them longer than the largest size.
        """
        every = list(waiting)
        self._update({batch.tenant for batch in every})
        filling = _Filling(self, every, self._sizes[-1])
        kind = filling.first().kind
        some = [batch for batch in every if batch.kind == kind]
        rows = self._rows(some)
        chosen = _Filling(self, some, rows).fill()
        tokens = sum(chosen.padded(self._limits).values())
        rows = next(size for size in self._sizes if size >= tokens)
        self.num_rows += rows
        return Turn(kind=kind, microbatch=in_order(chosen.samples), rows=rows)

    def _update(self, tenants: set[Hashable]) -> None:
        """Starts the time of tenants who did not wait before."""
        stayed = [self._times[one] for one in tenants & self._active]
        if stayed:
            self._least = max(self._least, min(stayed))
        # A tenant who sends its next batch when the last one has ended keeps what it is
        # owed; one who was long away does not.
        start = self._least - self._quantum
        for one in tenants - self._active:
            self._times[one] = max(self._times.get(one, start), start)
        for one in [t for t in self._times if self._times[t] <= start]:
            if one not in tenants:
                del self._times[one]
        self._active = tenants

    def _rows(self, some: Sequence[WaitingBatch]) -> int:
        """Returns the size with which all that waits takes the fewest rows."""
        tokens: dict[int, int] = {}
        for batch in some:
            tokens[batch.owner] = tokens.get(batch.owner, 0) + batch.num_tokens
        padded = self._limits.padded
        total = sum(map(padded, tokens.values()))
        longest = padded(max(batch.longest for batch in some))
        if total >= self._sizes[-1]:
            return self._sizes[-1]
        best = self._best[total // self._limits.block_tokens]
        return next(size for size in self._sizes if size >= max(best, longest))


@dataclasses.dataclass(slots=True)
class _Chosen:
    """Samples that are in a microbatch, and their tokens by owner; owners by tenant."""

    samples: list[Sample] = dataclasses.field(default_factory=list)
    tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    owners: dict[Hashable, set[int]] = dataclasses.field(default_factory=dict)

    def padded(self, limits: Limits) -> Mapping[int, int]:
        """Returns the rows of each owner."""
        return {owner: limits.padded(n) for owner, n in self.tokens.items()}


class _Filling:
    """A microbatch that is being filled."""

    def __init__(self, queue: FairQueue, some: Sequence[WaitingBatch], rows: int):
        self._queue, self._room = queue, rows
        self._left = list(some)
        self._chosen = _Chosen()
        most: dict[Hashable, int] = {}
        for batch in some:
            most[batch.tenant] = most.get(batch.tenant, 0) + batch.num_tokens
        largest = queue._sizes[-1]
        around = sum(min(tokens, largest) for tokens in most.values())
        self._max_wait = max(queue._max_wait, around)

    def first(self) -> WaitingBatch:
        """Returns the batch whose turn it is."""
        times = self._queue._times
        least = min(times[batch.tenant] for batch in self._left)
        return min(self._left, key=lambda batch: self._key(batch, least))

    def fill(self) -> _Chosen:
        """Takes samples until none that is left fits."""
        limits, owners = self._queue._limits, self._chosen.tokens
        while self._left and self._room:
            if len(owners) == limits.most_jobs:
                self._left = [one for one in self._left if one.owner in owners]
                if not self._left:
                    break
            batch = self.first()
            self._left.remove(batch)
            if self._fits(batch, batch.num_tokens, len(batch.samples)):
                self._take(batch, batch.samples)
            elif (rest := self._take_part(batch)) is not None:
                self._left.append(rest)
        return self._chosen

    def _key(self, batch: WaitingBatch, least: float) -> tuple:
        """Returns what orders the batches that are left."""
        queue = self._queue
        time = queue._times[batch.tenant]
        if time > least + queue._quantum:
            return (4, time, batch.came)
        fits = self._fits(batch, batch.num_tokens, len(batch.samples))
        if batch.has_begun and fits:
            return (0, batch.num_tokens, batch.came)
        if queue.num_rows - batch.came > self._max_wait:
            return (1, batch.came, time)
        if not batch.is_near:
            time += _MOVE * queue._sizes[-1]
        return (2 if fits else 3, time, batch.came)

    def _added(self, owner: int, tokens: int) -> int:
        """Returns the rows that further tokens of an owner would add."""
        padded = self._queue._limits.padded
        before = self._chosen.tokens.get(owner, 0)
        return padded(before + tokens) - padded(before)

    def _fits(self, batch: WaitingBatch, tokens: int, number: int = 1) -> bool:
        """Whether a number of samples of a batch fits."""
        limits, chosen = self._queue._limits, self._chosen
        return (
            self._added(batch.owner, tokens) <= self._room
            and len(chosen.samples) + number <= limits.most_samples
            and (batch.owner in chosen.tokens or self._has_place(batch.tenant))
        )

    def _has_place(self, tenant: Hashable) -> bool:
        """Whether there is a place for another owner of a tenant."""
        if len(self._chosen.tokens) >= self._queue._limits.most_jobs:
            return False
        most = self._queue._most_owners_of(tenant)
        return most is None or len(self._chosen.owners.get(tenant, ())) < most

    def _take(self, batch: WaitingBatch, samples: Sequence[Sample]) -> None:
        queue, owner, chosen = self._queue, batch.owner, self._chosen
        tokens = sum(sample.num_tokens for sample in samples)
        added = self._added(owner, tokens)
        self._room -= added
        chosen.samples += samples
        chosen.tokens[owner] = chosen.tokens.get(owner, 0) + tokens
        chosen.owners.setdefault(batch.tenant, set()).add(owner)
        queue._times[batch.tenant] += added / queue.weight(batch.tenant)

    def _take_part(self, batch: WaitingBatch) -> WaitingBatch | None:
        """Takes samples of a batch that does not fit, the longest first.

        Returns:
            The batch without them, if its turn was over before the room was; None:
            nothing else of it fits.
        """
        times, tenant = self._queue._times, batch.tenant
        if not self._fits(batch, batch.shortest):
            return None
        others = [times[b.tenant] for b in self._left if b.tenant != tenant]
        until = max(times[tenant], min(others, default=math.inf)) + self._queue._quantum
        order = sorted(batch.samples, key=lambda sample: -sample.num_tokens)
        left = []
        for number, sample in enumerate(order):
            if times[tenant] >= until:
                rest = in_order([*left, *order[number:]])
                return dataclasses.replace(batch, samples=rest)
            if self._fits(batch, sample.num_tokens):
                self._take(batch, [sample])
            elif not self._fits(batch, batch.shortest):
                return None
            else:
                left.append(sample)
        return None


def _best_sizes(sizes: Sequence[int], block: int) -> list[int]:
    """Returns the first of the microbatches that take the fewest rows together.

    Args:
        sizes: The sizes that a microbatch can have, in tokens, sorted.
        block: Tokens of a block.

    Returns:
        For each number of blocks that wait, up to the largest size, the size of the
        microbatch that runs first. The largest of those that all have the same total.
    """
    launch = _LAUNCH * sizes[-1]
    costs, best = [0.0], [sizes[0]]
    for blocks in range(1, sizes[-1] // block + 1):
        found = [
            (size + launch + costs[max(0, blocks - size // block)], -size)
            for size in sizes
        ]
        cost, size = min(found)
        costs.append(cost)
        best.append(-size)
    return best

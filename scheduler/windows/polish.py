"""Polishes the simulated makespan of a few ticks."""

import dataclasses

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.types import Limits, Pipeline, Schedule, in_order
from jaxlora.scheduler.windows.cursor import Item, WorkModel
from jaxlora.scheduler.windows.segment import Segment

# Slots that are polished together, and how far the next ones start after them.
POLISHED_SLOTS = 24
POLISHED_STRIDE = 16

# An item moves at most this many slots.
_REACH = 8
# Exchanges that are simulated in a round, and those of them that may be made together.
_MAX_EXCHANGES = 128
_MAX_TOGETHER = 8
# A relative saving that is worth another round.
_MIN_SAVING = 2e-4
# Paths that differ by less than this part of a forward pass count together, in turn.
_SMOOTHING = (1.0, 0.3, 0.1, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Exchanges:
    """Items that move to another slot, some in exchange for another item.

    Attributes:
        give: Items that move [exchanges].
        to: Slots that they move to [exchanges].
        take: Items that move back in exchange, or -1 [exchanges].
    """

    give: np.ndarray
    to: np.ndarray
    take: np.ndarray

    def __getitem__(self, which) -> "_Exchanges":
        return _Exchanges(self.give[which], self.to[which], self.take[which])


class Polish:
    """Moves and exchanges the items of some slots while that shortens the makespan.

    In each round, the change of the makespan with a little more or less work in each
    slot ranks all exchanges. The most promising ones are simulated, and the best ones
    are made.
    """

    def __init__(
        self,
        slots: list[list[Item]],
        earliest: dict[int, int],
        limits: Limits,
        pipeline: Pipeline,
        cost: CostModel,
    ):
        """Starts with the given slots.

        Args:
            slots: Items of each slot of the schedule, or of a part of it.
            earliest: For each job, the slot from which its first batch in `slots` may
                run. It may be negative.
            limits: Capacity and block size.
            pipeline: Stages, and distance between the batches of a job.
            cost: Times of the passes.
        """
        self._limits, self._pipeline, self._cost = limits, pipeline, cost
        self._items = [item for slot in slots for item in slot]
        self._slot = np.repeat(np.arange(len(slots)), [len(slot) for slot in slots])
        self._work = np.array([item[0] for item in self._items])
        self._size = np.array([item[1] for item in self._items])
        jobs = sorted({item[2].owner for item in self._items})
        column = {job: i for i, job in enumerate(jobs)}
        self._job = np.array([column[item[2].owner] for item in self._items], int)
        batches = sorted({(item[2].owner, item[2].batch) for item in self._items})
        row = {batch: i for i, batch in enumerate(batches)}
        self._batch = np.array(
            [row[item[2].owner, item[2].batch] for item in self._items], int
        )
        self._follows = np.array(
            [i > 0 and b[0] == batches[i - 1][0] for i, b in enumerate(batches)], bool
        )
        self._earliest = np.array([earliest[job] for job, _ in batches], int)
        self._tokens = np.zeros((len(slots), len(jobs)), int)
        np.add.at(self._tokens, (self._slot, self._job), self._size)

    def run(self, first: int, last: int, max_rounds: int) -> float:
        """Polishes the slots [first, last), and returns the makespan.

        Args:
            first: First slot whose items may move.
            last: Slot after the last one whose items may move.
            max_rounds: Maximum number of rounds.
        """
        part = slice(first, last)
        segment = Segment(*self._sizes(), first, last, self._cost, self._pipeline)
        best = self._makespan(segment, part), self._slot, self._tokens
        tokens = self._sizes()[0][part]
        unit = max(self._cost.stages[0].forward(tokens.mean(), 0), 0)
        for smoothing in _SMOOTHING:
            self._descend(segment, part, max_rounds, smoothing * unit)
            now = self._makespan(segment, part)
            if now < best[0] * (1 - 1e-9):
                best = now, self._slot, self._tokens
        _, self._slot, self._tokens = best
        return best[0]

    def _makespan(self, segment: Segment, part: slice, smoothing: float = 0.0) -> float:
        tokens, squares = self._sizes()
        columns = tokens[part, None], squares[part, None]
        return float(segment.makespans(*columns, smoothing)[0])

    def _descend(
        self, segment: Segment, part: slice, max_rounds: int, smoothing: float
    ) -> None:
        self._slot, self._tokens = self._slot.copy(), self._tokens.copy()
        now = self._makespan(segment, part, smoothing)
        for _ in range(max_rounds):
            tried = self._promising(segment, part, now, smoothing)
            if not len(tried.give):
                break
            times = segment.makespans(*self._variants(tried, part), smoothing)
            best = self._disjoint(tried, np.argsort(times, kind="stable"), times < now)
            if not len(best):
                break
            together = tried[best]
            times = segment.makespans(*self._cumulative(together, part), smoothing)
            num = int(np.argmin(times))
            saving, now = now - times[num], times[num]
            self._make(together[: num + 1])
            if saving < _MIN_SAVING * now:
                break

    def _sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the padded tokens and the squares of each slot."""
        squares = np.zeros(len(self._tokens))
        np.add.at(squares, self._slot, self._size.astype(float) ** 2)
        return self._padded(self._tokens).sum(axis=1).astype(float), squares

    def _padded(self, tokens: np.ndarray) -> np.ndarray:
        block = self._limits.block_tokens
        return -(-tokens // block) * block

    def _promising(
        self, segment: Segment, part: slice, now: float, smoothing: float
    ) -> _Exchanges:
        """Returns the exchanges that should shorten the makespan the most."""
        gain, loss = self._slopes(segment, part, now, smoothing)
        low, high = self._ranges()
        items = np.flatnonzero((self._slot >= part.start) & (self._slot < part.stop))
        items = items[gain[self._slot[items] - part.start] > 0]
        every = np.arange(len(self._items))
        others = every[(self._slot >= part.start) & (self._slot < part.stop)]
        slots = np.arange(part.start, part.stop)
        # An exchange for another item, and a move without one.
        to = np.concatenate([self._slot[others], slots])
        take = np.concatenate([others, np.full(len(slots), -1)])
        work = np.concatenate([self._work[others], np.zeros(len(slots), int)])
        back = np.concatenate([self._batch[others], np.zeros(len(slots), int)])
        own, batch = self._slot[items][:, None], self._batch[items][:, None]
        moved = self._work[items][:, None] - work
        saved = moved * (gain[own - part.start] - loss[to - part.start])
        is_legal = (moved > 0) & (own != to) & (abs(own - to) <= _REACH)
        is_legal &= (low[batch] <= to) & (to <= high[batch])
        is_legal &= ((low[back] <= own) & (own <= high[back])) | (take < 0)
        saved = np.where(is_legal, saved, 0.0)
        num = min(2 * _MAX_EXCHANGES, saved.size)
        best = np.argsort(-saved, axis=None, kind="stable")[:num]
        best = best[saved.ravel()[best] > 0]
        rows, columns = np.unravel_index(best, saved.shape)
        found = _Exchanges(items[rows], to[columns], take[columns])
        tokens, _ = self._changes(found)
        fits = (tokens <= self._limits.capacity).all(axis=0)
        held = np.bincount(self._slot, minlength=len(self._tokens))
        fits &= held[found.to] + (found.take < 0) <= self._limits.most_samples
        return found[np.flatnonzero(fits)[:_MAX_EXCHANGES]]

    def _slopes(
        self, segment: Segment, part: slice, now: float, smoothing: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns how the makespan changes with a little less or more work of a slot.

        Returns:
            Saved time per token less, and lost time per token more, of each slot.
        """
        tokens, squares = (x[part, None] for x in self._sizes())
        num = len(tokens)
        is_real = tokens[:, 0] > 0
        # An empty slot gets an item, and not a part of one.
        step = np.where(is_real, 2 * self._limits.block_tokens, self._size.mean())
        less = np.maximum(tokens - np.diag(step), 0)
        more = tokens + np.diag(step)
        if self._cost.buckets:
            more = np.minimum(more, self._limits.capacity)
        both = np.concatenate([less, more], axis=1)
        times = segment.makespans(both, np.repeat(squares, 2 * num, axis=1), smoothing)
        return (now - times[:num]) / step * is_real, (times[num:] - now) / step

    def _ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first and the last slot that items of each batch may have."""
        num, distance = len(self._tokens), self._pipeline.distance
        first = np.full(len(self._follows), num)
        last = np.full(len(self._follows), -1)
        np.minimum.at(first, self._batch, self._slot)
        np.maximum.at(last, self._batch, self._slot)
        low, high = self._earliest.copy(), np.full(len(first), num - 1)
        after = np.flatnonzero(self._follows)
        low[after] = last[after - 1] + distance
        high[after - 1] = first[after] - distance
        return low, high

    def _changes(self, made: _Exchanges) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sizes of the giving and the receiving slots after exchanges.

        Returns:
            Padded tokens and squares [2, exchanges].
        """
        tokens, squares = self._sizes()
        give, take = made.give, made.take
        own, job, other = self._slot[give], self._job[give], self._job[take]
        size = self._size[give]
        back = np.where(take >= 0, self._size[take], 0)
        new_tokens, new_squares = [], []
        for slot, change, back_change in ((own, -size, back), (made.to, size, -back)):
            held, held_back = self._tokens[slot, job], self._tokens[slot, other]
            same = job == other
            of_job = held + change + np.where(same, back_change, 0)
            of_other = np.where(same, 0, held_back + back_change)
            before = self._padded(held) + np.where(same, 0, self._padded(held_back))
            after = self._padded(of_job) + self._padded(of_other)
            new_tokens.append(tokens[slot] - before + after)
            sign = np.sign(change)
            new_squares.append(squares[slot] + sign * (size**2.0 - back**2.0))
        return np.array(new_tokens), np.array(new_squares)

    def _variants(
        self, tried: _Exchanges, part: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sizes of the segment's slots after each exchange."""
        out, every = [], np.arange(len(tried.give))
        for now, new in zip(self._sizes(), self._changes(tried), strict=True):
            sizes = np.repeat(now[part, None], len(every), axis=1)
            sizes[self._slot[tried.give] - part.start, every] = new[0]
            sizes[tried.to - part.start, every] = new[1]
            out.append(sizes)
        return out[0], out[1]

    def _cumulative(
        self, made: _Exchanges, part: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sizes after the first exchange, the first two, and so on."""
        out = []
        for now, each in zip(self._sizes(), self._variants(made, part), strict=True):
            change = each - now[part, None]
            out.append(now[part, None] + change.cumsum(axis=1))
        return out[0], out[1]

    def _disjoint(
        self, tried: _Exchanges, order: np.ndarray, is_better: np.ndarray
    ) -> list[int]:
        """Returns the best exchanges that do not depend on each other."""
        out: list[int] = []
        slots: set[int] = set()
        batches: dict[int, int] = {}
        for i in order:
            if not is_better[i] or len(out) == _MAX_TOGETHER:
                break
            used = {int(self._slot[tried.give[i]]), int(tried.to[i])}
            moved = [k for k in (int(tried.give[i]), int(tried.take[i])) if k >= 0]
            of_job = {int(self._job[k]): int(self._batch[k]) for k in moved}
            if len({int(self._batch[k]) for k in moved}) > len(of_job):
                continue
            if used & slots or any(batches.get(j, b) != b for j, b in of_job.items()):
                continue
            out.append(int(i))
            slots |= used
            batches |= of_job
        return out

    def _make(self, made: _Exchanges) -> None:
        for give, to, take in zip(made.give, made.to, made.take, strict=True):
            own = self._slot[give]
            for item, slot in ((give, to), (take, own)):
                if item >= 0:
                    self._tokens[self._slot[item], self._job[item]] -= self._size[item]
                    self._tokens[slot, self._job[item]] += self._size[item]
                    self._slot[item] = slot

    def result(self) -> list[list[Item]]:
        """Returns the items of each slot."""
        out: list[list[Item]] = [[] for _ in self._tokens]
        for item, slot in zip(self._items, self._slot, strict=True):
            out[slot].append(item)
        return out


def polished(
    schedule: Schedule, cost: CostModel, pipeline: Pipeline, max_rounds: int
) -> Schedule:
    """Polishes a whole schedule, part by part.

    Args:
        schedule: The schedule.
        cost: Times of the passes.
        pipeline: Stages, and distance between the batches of a job.
        max_rounds: Maximum number of rounds for each part.
    """
    work, limits = WorkModel.from_cost(cost), schedule.limits
    slots = [[work.item(sample) for sample in m] for m in schedule.microbatches]
    # Polishing may spread the first and the last items over more slots.
    more: list[list[Item]] = [[]] * pipeline.num_stages
    slots = [*more, *slots, *more]
    earliest = {item[2].owner: 0 for slot in slots for item in slot}
    polish = Polish(slots, earliest, limits, pipeline, cost)
    for first in range(0, len(slots), POLISHED_STRIDE):
        polish.run(first, min(first + POLISHED_SLOTS, len(slots)), max_rounds)
    found = [in_order(item[2] for item in items) for items in polish.result()]
    real = [i for i, microbatch in enumerate(found) if microbatch]
    return Schedule(microbatches=tuple(found[real[0] : real[-1] + 1]), limits=limits)

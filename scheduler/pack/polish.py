"""Moves and exchanges samples to shorten a simulated makespan, some ticks at a time."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes
from jaxlora.scheduler.pack.jobs import Item, WorkModel
from jaxlora.scheduler.pack.segment import Segment
from jaxlora.scheduler.types import Limits, Microbatch, in_order

# Ticks that are polished together, and ticks from the start of one part to the next.
_TICKS = 24
_STRIDE = 16
# Rounds of exchanges in each part, at most.
_MAX_ROUNDS = 40

# An item moves at most this many ticks.
_REACH = 8
# Exchanges that are simulated in a round, and that may be made together, at most.
_MAX_EXCHANGES = 128
_MAX_TOGETHER = 8
# A relative saving that is worth another round.
_MIN_SAVING = 2e-4
# Paths that differ by less than this part of a forward pass count together. Polishing
# takes these values in turn.
_SMOOTHING = (1.0, 0.3, 0.1, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Exchanges:
    """Items that move to another place, some in exchange for another item.

    Attributes:
        give: Items that move [exchanges].
        to: Places that they move to [exchanges].
        take: Items that move back in exchange, or -1 [exchanges].
    """

    give: np.ndarray
    to: np.ndarray
    take: np.ndarray

    def __getitem__(self, which) -> "_Exchanges":
        return _Exchanges(self.give[which], self.to[which], self.take[which])


class Polish:
    """Moves and exchanges the items of some ticks while that shortens the makespan.

    Each round ranks all exchanges by how the makespan changes with a little more or
    less work in each tick. The most promising ones are simulated, and the best ones are
    made. A tick takes the time of its slowest microbatch.

    With n lanes, microbatch i of tick t is at place t * n + i.
    """

    def __init__(
        self,
        places: Sequence[Sequence[Item]],
        earliest: Mapping[int, int],
        limits: Limits,
        lanes: Lanes,
        cost: CostModel,
    ):
        """Starts with the given microbatches.

        Args:
            places: Items of each microbatch of the schedule, or of a part of it.
            earliest: For each job, the tick from which its first batch in `places` may
                run. It may be negative.
            limits: Capacity and block size.
            lanes: The lanes, and their pipeline.
            cost: Times of the passes of a microbatch on one lane.
        """
        self._limits, self._cost = limits, cost
        self._lanes, self._pipeline = lanes.num_lanes, lanes.pipeline
        self._items = [item for place in places for item in place]
        self._place = np.repeat(np.arange(len(places)), [len(p) for p in places])
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
        self._tokens = np.zeros((len(places), len(jobs)), int)
        np.add.at(self._tokens, (self._place, self._job), self._size)

    def run(self, first: int, last: int) -> float:
        """Moves items within the ticks [first, last), and returns the makespan."""
        part = slice(first * self._lanes, last * self._lanes)
        sizes = self._of_ticks(self._sizes()[:, :, None])[:, :, 0]
        segment = Segment(sizes, first, last, self._cost, self._pipeline)
        best = self._makespan(segment, part), self._place, self._tokens
        mean = self._sizes()[0, part].mean()
        unit = max(self._cost.stages[0].forward(mean, 0), 0)
        steps = [(self._descend, smoothing) for smoothing in _SMOOTHING]
        steps += [(self._move_ticks, smoothing) for smoothing in _SMOOTHING[-2:]]
        steps.append((self._descend, 0.0))
        for step, smoothing in steps:
            if step == self._move_ticks:
                _, self._place, self._tokens = best
            step(segment, part, smoothing * unit)
            now = self._makespan(segment, part)
            if now < best[0] * (1 - 1e-9):
                best = now, self._place, self._tokens
        _, self._place, self._tokens = best
        return best[0]

    def _makespan(self, segment: Segment, part: slice, smoothing: float = 0.0) -> float:
        sizes = self._of_ticks(self._sizes()[:, part, None])
        return float(segment.makespans(sizes, smoothing)[0])

    def _of_ticks(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the sizes of the slowest microbatch of each tick.

        Args:
            sizes: Padded tokens and squares [2, places, variants].
        """
        if self._lanes == 1:
            return sizes
        sizes = sizes.reshape(2, -1, self._lanes, sizes.shape[2])
        both = self._cost.stages[0].forward + self._cost.stages[0].backward
        slowest = both(*sizes).argmax(axis=1)[None, :, None]
        return np.take_along_axis(sizes, slowest, axis=2)[:, :, 0]

    def _descend(self, segment: Segment, part: slice, smoothing: float) -> None:
        self._place, self._tokens = self._place.copy(), self._tokens.copy()
        now = self._makespan(segment, part, smoothing)
        for _ in range(_MAX_ROUNDS):
            tried = self._promising(segment, part, now, smoothing)
            if not len(tried.give):
                break
            variants = self._of_ticks(self._variants(tried, part))
            times = segment.makespans(variants, smoothing)
            best = self._disjoint(tried, np.argsort(times, kind="stable"), times < now)
            if not len(best):
                break
            together = tried[best]
            variants = self._of_ticks(self._cumulative(together, part))
            times = segment.makespans(variants, smoothing)
            num = int(np.argmin(times))
            saving, now = now - times[num], times[num]
            self._make(together[: num + 1])
            if saving < _MIN_SAVING * now:
                break

    def _move_ticks(self, segment: Segment, part: slice, smoothing: float) -> None:
        """Moves whole ticks, and no-ops, while that shortens the makespan."""
        n, first = self._lanes, part.start // self._lanes
        orders, ticks = _moves(part.stop // n - first)
        now = self._makespan(segment, part, smoothing)
        for _ in range(_MAX_ROUNDS):
            legal = np.flatnonzero(self._are_legal(ticks, first))
            if not len(legal):
                break
            sizes = self._of_ticks(self._sizes()[:, part, None])[:, :, 0]
            times = segment.makespans(sizes[:, orders[legal].T], smoothing)
            best = int(np.argmin(times))
            if times[best] >= now * (1 - 1e-6):
                break
            now, moved = float(times[best]), ticks[legal[best]]
            inside = (self._place >= part.start) & (self._place < part.stop)
            tick = self._place[inside] // n - first
            self._place = self._place.copy()
            self._place[inside] = (first + moved[tick]) * n + self._place[inside] % n
            self._tokens = np.zeros_like(self._tokens)
            np.add.at(self._tokens, (self._place, self._job), self._size)

    def _are_legal(self, ticks: np.ndarray, first: int) -> np.ndarray:
        """Returns which moves of ticks keep all batches apart [moves].

        Args:
            ticks: The new place of each tick in the part [moves, ticks].
            first: First tick of the part.
        """
        pairs = np.unique(np.stack([self._batch, self._place // self._lanes]), axis=1)
        starts = np.flatnonzero(np.diff(pairs[0], prepend=-1))
        old = pairs[1] - first
        inside = (old >= 0) & (old < ticks.shape[1])
        new = np.repeat(pairs[1][None], len(ticks), axis=0)
        new[:, inside] = first + ticks[:, old[inside]]
        low = np.minimum.reduceat(new, starts, axis=1)
        high = np.maximum.reduceat(new, starts, axis=1)
        after = np.flatnonzero(self._follows)
        gaps = low[:, after] - high[:, after - 1]
        is_apart = (gaps >= self._pipeline.distance).all(axis=1)
        return is_apart & (low >= self._earliest).all(axis=1)

    def _sizes(self) -> np.ndarray:
        """Returns the padded tokens and the squares of each microbatch [2, places]."""
        squares = np.zeros(len(self._tokens))
        np.add.at(squares, self._place, self._size.astype(float) ** 2)
        return np.stack([self._padded(self._tokens).sum(axis=1), squares])

    def _padded(self, tokens: np.ndarray) -> np.ndarray:
        block = self._limits.block_tokens
        return -(-tokens // block) * block

    def _promising(
        self, segment: Segment, part: slice, now: float, smoothing: float
    ) -> _Exchanges:
        """Returns the exchanges that should shorten the makespan the most."""
        n, start = self._lanes, part.start
        gain, loss = self._slopes(segment, part, now, smoothing)
        low, high = self._ranges()
        is_inside = (self._place >= start) & (self._place < part.stop)
        others = np.flatnonzero(is_inside)
        items = others[gain[(self._place[others] - start) // n] > 0]
        if not len(items):
            return _Exchanges(items, items, items)
        places = np.arange(start, part.stop)
        # An exchange for another item, and a move without one.
        to = np.concatenate([self._place[others], places])
        take = np.concatenate([others, np.full(len(places), -1)])
        work = np.concatenate([self._work[others], np.zeros(len(places), int)])
        back = np.concatenate([self._batch[others], np.zeros(len(places), int)])
        own, batch = self._place[items][:, None], self._batch[items][:, None]
        moved = self._work[items][:, None] - work
        saved = self._saved(own, to, moved, gain, loss, start)
        own_tick, to_tick = own // n, to // n
        is_legal = (moved > 0) & (own != to) & (abs(own_tick - to_tick) <= _REACH)
        is_legal &= (low[batch] <= to_tick) & (to_tick <= high[batch])
        is_legal &= ((low[back] <= own_tick) & (own_tick <= high[back])) | (take < 0)
        saved = np.where(is_legal, saved, 0.0)
        best = first_largest(saved.ravel(), 2 * _MAX_EXCHANGES)
        rows, columns = np.unravel_index(best, saved.shape)
        found = _Exchanges(items[rows], to[columns], take[columns])
        tokens, _ = self._changes(found)
        fits = (tokens <= self._limits.capacity).all(axis=0)
        held = np.bincount(self._place, minlength=len(self._tokens))
        fits &= held[found.to] + (found.take < 0) <= self._limits.most_samples
        if self._limits.max_jobs is not None:
            fits &= self._num_jobs(found) <= self._limits.max_jobs
        return found[np.flatnonzero(fits)[:_MAX_EXCHANGES]]

    def _saved(
        self,
        own: np.ndarray,
        to: np.ndarray,
        moved: np.ndarray,
        gain: np.ndarray,
        loss: np.ndarray,
        start: int,
    ) -> np.ndarray:
        """Estimates the time that exchanges save [exchanges].

        Args:
            own: Place of the item that moves.
            to: The place that it moves to.
            moved: Work that the first place gives to the second.
            gain: For each tick, the time saved by each token less.
            loss: For each tick, the time lost by each token more.
            start: First place of the ticks.
        """
        n = self._lanes
        if n == 1:
            return moved * (gain[own - start] - loss[to - start])
        work = np.zeros(len(self._tokens))
        np.add.at(work, self._place, self._work)
        ordered = np.sort(work.reshape(-1, n), axis=1)[:, ::-1]
        most, second = ordered[:, 0].repeat(n), ordered[:, 1].repeat(n)
        rest = np.where(work == most, second, most)  # of the other lanes
        less = most[own] - np.maximum(rest[own], work[own] - moved)
        more = np.maximum(rest[to], work[to] + moved) - most[to]
        saved = less * gain[(own - start) // n] - more * loss[(to - start) // n]
        # Within a tick, the slower lane gives work to the faster one.
        evened = np.maximum(work[own] - moved, work[to] + moved)
        within = (most[own] - np.maximum(evened, 0)) * gain[(own - start) // n]
        return np.where(own // n == to // n, within, saved)

    def _slopes(
        self, segment: Segment, part: slice, now: float, smoothing: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns how the makespan changes with a little less or more work in a tick.

        Returns:
            For each tick, the time saved by each token less, and lost by each more.
        """
        tokens, squares = self._of_ticks(self._sizes()[:, part, None])
        num = len(tokens)
        is_real = tokens[:, 0] > 0
        # An empty tick gets a whole item.
        step = np.where(is_real, 2 * self._limits.block_tokens, self._size.mean())
        less = np.maximum(tokens - np.diag(step), 0)
        more = tokens + np.diag(step)
        if self._cost.buckets:
            more = np.minimum(more, self._limits.capacity)
        both = np.concatenate([less, more], axis=1)
        sizes = np.stack([both, np.repeat(squares, 2 * num, axis=1)])
        times = segment.makespans(sizes, smoothing)
        return (now - times[:num]) / step * is_real, (times[num:] - now) / step

    def _ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first and the last tick in which items of each batch may run."""
        num, distance = len(self._tokens) // self._lanes, self._pipeline.distance
        tick = self._place // self._lanes
        first = np.full(len(self._follows), num)
        last = np.full(len(self._follows), -1)
        np.minimum.at(first, self._batch, tick)
        np.maximum.at(last, self._batch, tick)
        low, high = self._earliest.copy(), np.full(len(first), num - 1)
        after = np.flatnonzero(self._follows)
        low[after] = last[after - 1] + distance
        high[after - 1] = first[after] - distance
        return low, high

    def _changes(self, made: _Exchanges) -> np.ndarray:
        """Returns the sizes of both microbatches of exchanges [2, 2, exchanges]."""
        tokens, squares = self._sizes()
        give, take = made.give, made.take
        own, job, other = self._place[give], self._job[give], self._job[take]
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
        return np.array([new_tokens, new_squares])

    def _num_jobs(self, made: _Exchanges) -> np.ndarray:
        """Returns the most jobs in a microbatch of each exchange [exchanges]."""
        give, take, own, to = made.give, made.take, self._place[made.give], made.to
        job, other, held = self._job[give], self._job[take], self._tokens
        num, is_other = (held > 0).sum(axis=1), (take >= 0) & (job != other)
        is_last = (held[own, job] == self._size[give]) & (is_other | (take < 0))
        is_new = is_other & (held[own, other] == 0)
        at_own = num[own] - is_last + is_new
        is_last = is_other & (held[to, other] == self._size[take])
        at_to = num[to] + (held[to, job] == 0) - is_last
        return np.maximum(at_own, at_to)

    def _variants(self, tried: _Exchanges, part: slice) -> np.ndarray:
        """Returns the sizes of the part's microbatches after each exchange."""
        every, new = np.arange(len(tried.give)), self._changes(tried)
        out = np.repeat(self._sizes()[:, part, None], len(every), axis=2)
        out[:, self._place[tried.give] - part.start, every] = new[:, 0]
        out[:, tried.to - part.start, every] = new[:, 1]
        return out

    def _cumulative(self, made: _Exchanges, part: slice) -> np.ndarray:
        """Returns the sizes after the first exchange, the first two, and so on."""
        now = self._sizes()[:, part, None]
        return now + (self._variants(made, part) - now).cumsum(axis=2)

    def _disjoint(
        self, tried: _Exchanges, order: np.ndarray, is_better: np.ndarray
    ) -> list[int]:
        """Returns the best exchanges that do not depend on each other."""
        out: list[int] = []
        ticks: set[int] = set()
        batches: dict[int, int] = {}
        for i in order:
            if not is_better[i] or len(out) == _MAX_TOGETHER:
                break
            places = int(self._place[tried.give[i]]), int(tried.to[i])
            used = {place // self._lanes for place in places}
            moved = [k for k in (int(tried.give[i]), int(tried.take[i])) if k >= 0]
            of_job = {int(self._job[k]): int(self._batch[k]) for k in moved}
            if len({int(self._batch[k]) for k in moved}) > len(of_job):
                continue
            if used & ticks or any(batches.get(j, b) != b for j, b in of_job.items()):
                continue
            out.append(int(i))
            ticks |= used
            batches |= of_job
        return out

    def _make(self, made: _Exchanges) -> None:
        for give, to, take in zip(made.give, made.to, made.take, strict=True):
            own = self._place[give]
            for item, place in ((give, to), (take, own)):
                if item >= 0:
                    self._tokens[self._place[item], self._job[item]] -= self._size[item]
                    self._tokens[place, self._job[item]] += self._size[item]
                    self._place[item] = place

    def result(self) -> list[list[Item]]:
        """Returns the items of each microbatch."""
        out: list[list[Item]] = [[] for _ in self._tokens]
        for item, place in zip(self._items, self._place, strict=True):
            out[place].append(item)
        return out


def first_largest(values: np.ndarray, num: int) -> np.ndarray:
    """Returns the places of the largest positive values, the largest first.

    Equal ones are in order. `np.argpartition` chooses among those by the features of
    the processor, and all processes of a run must make the same plans.
    """
    least = np.partition(values, -num)[-num] if num < len(values) else 0.0
    places = np.flatnonzero((values > 0) & (values >= least))
    return places[np.argsort(-values[places], kind="stable")][:num]


@functools.cache
def _moves(num: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ways to move one of some ticks to another place [moves, ticks].

    Returns:
        The ticks in their new order, and the new place of each tick.
    """
    orders = []
    for tick, to in itertools.permutations(range(num), 2):
        if abs(tick - to) <= _REACH and to != tick - 1:  # is tick - 1 moved to tick
            order = [i for i in range(num) if i != tick]
            orders.append([*order[:to], tick, *order[to:]])
    found = np.array(orders, int).reshape(-1, num)
    return found, np.argsort(found, axis=1)


def polished(
    ticks: Sequence[Sequence[Microbatch]],
    limits: Limits,
    lanes: Lanes,
    cost: CostModel,
    *,
    before: Sequence[Sequence[Microbatch]] = (),
    after: Sequence[Sequence[Microbatch]] = (),
    earliest: Mapping[int, int] | None = None,
    everywhere: bool = True,
) -> list[list[Microbatch]]:
    """Polishes ticks, part by part.

    Args:
        ticks: The ticks, each with at most one microbatch for each lane.
        limits: Capacity and block size.
        lanes: The lanes, and their pipeline.
        cost: Times of the passes of a microbatch on one lane.
        before: Ticks before them, which stay as they are.
        after: Ticks after them, which stay as they are.
        earliest: For each job, the first of the ticks in which it may run; jobs that
            are absent may run in all of them.
        everywhere: Whether to polish all parts, and not only those near no-ops, and
            where the pipeline fills or drains.
    """
    work, n, num = WorkModel.from_cost(cost), lanes.num_lanes, lanes.pipeline.num_stages
    # Polishing may spread the first and the last items over more ticks.
    lead, trail = (list(x) or [[]] * num for x in (before, after))
    whole = [*lead, *ticks, *trail]
    padded = [[*tick, *((),) * (n - len(tick))] for tick in whole]
    places = [[work.item(s) for s in m] for tick in padded for m in tick]
    first = {item[2].owner: 0 for place in places for item in place}
    first |= {job: len(lead) + tick for job, tick in (earliest or {}).items()}
    polish = Polish(places, first, limits, lanes, cost)
    start, stop = len(before), len(whole) - len(after)
    edges = [i for i, tick in enumerate(padded) if not any(tick)]
    for begin in range(start, stop, _STRIDE):
        end = min(begin + _TICKS, stop)
        if everywhere or any(begin - num <= edge < end + num for edge in edges):
            polish.run(begin, end)
    found = [in_order(item[2] for item in items) for items in polish.result()]
    out = [list(found[n * i : n * i + n]) for i in range(start, stop)]
    while not after and out and not any(out[-1]):
        out.pop()
    num_lead = 0 if before else next((i for i in range(num) if any(out[i])), num)
    return [[m for m in tick if m] for tick in out[num_lead:]]

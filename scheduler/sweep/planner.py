"""Plans a sweep: groups of GPUs whose slots are refilled as configurations end.

The groups are those of the program that bounds the makespan (`bound`), for makespans
at and slightly above the bound. Its shares are rounded to whole configurations and
assigned to the groups of each class, longest first. Then the group that ends last gives
configurations to groups that end early, or exchanges them, as long as that helps.
"""

import dataclasses
import heapq
from collections.abc import Iterator, Sequence

from jaxlora.scheduler.sweep.bound import GroupMix, find_bound, find_mix
from jaxlora.scheduler.sweep.problem import (
    Bound,
    Costs,
    Sweep,
    SweepPlan,
    number_gpus,
)
from jaxlora.scheduler.sweep.rounds import Kinds, Roster, Shape, play

# Makespans of further layouts, over the first one.
_TARGETS = (1.01, 1.02, 1.05, 1.1, 1.15)
_HOPEFUL = 1.1  # over the best plan: layouts that begin above it are not searched
_NUM_PLAYS = 1500  # of the search, for each mix
_GOOD_ENOUGH = 1.005  # over the bound
_NEAR = 8  # groups that end first and may take from the one that ends last


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSweep:
    """A plan and how much shorter any other could be.

    Attributes:
        plan: The plan.
        bound: Lower bounds of the makespan.
    """

    plan: SweepPlan
    bound: Bound

    @property
    def gap(self) -> float:
        """Makespan over the bound of plans with fixed groups."""
        return self.plan.makespan / self.bound.fixed_groups


def plan_sweep(sweep: Sweep, costs: Costs) -> PlannedSweep:
    """Plans a sweep on fixed groups of GPUs with slots that are refilled.

    The result depends only on the arguments: limits are numbers of nodes of the solver
    and of played groups, never seconds.

    Args:
        sweep: Configurations and GPUs.
        costs: Time and memory of groups.

    Raises:
        ValueError: A configuration fits into no group.
    """
    kinds = Kinds(sweep, costs)
    bound, makespan, mix = find_bound(kinds)
    goal = _GOOD_ENOUGH * bound.fixed_groups
    best = _Search(kinds, mix)
    best.run(goal)
    for target in _TARGETS:
        if best.makespan <= max(goal, makespan * target):
            break
        found, _ = find_mix(kinds, makespan * target)
        if found is not None:
            best = _better(best, found, goal)
    for equal in _equal_groups(kinds):
        if best.makespan > goal:
            best = _better(best, equal, goal)
    return PlannedSweep(plan=best.plan(), bound=bound)


def _better(best: "_Search", mix: GroupMix, goal: float) -> "_Search":
    """Searches a mix, unless it begins far above the best plan so far."""
    search = _Search(best.kinds, mix)
    if search.makespan <= _HOPEFUL * best.makespan:
        search.run(goal)
    return min(best, search, key=lambda one: one.makespan)


def _equal_groups(kinds: Kinds) -> Iterator[GroupMix]:
    """Yields layouts of groups of one shape, which all configurations fit."""
    for degree in kinds.degrees:
        shape = kinds.shape(degree, kinds.slot_ranks[-1])
        if all(shape.fits):
            one = shape, max(kinds.steps)
            shares = {k: float(count) for k, count in enumerate(kinds.count)}
            number = kinds.sweep.num_gpus // degree
            yield GroupMix(num_groups={one: number}, shares={one: shares})


class _Estimate:
    """A lower bound of the time of one group, kept up to date."""

    __slots__ = ("area", "longest", "shape", "spent", "steps")

    def __init__(self, shape: Shape, steps: Sequence[int], queue: Sequence[int] = ()):
        self.shape, self.steps = shape, steps
        self.area, self.longest = 0.0, 0
        self.spent = [0.0] * len(shape.fixed)
        for kind in queue:
            self.add(kind)

    def add(self, kind: int) -> None:
        steps = self.steps[kind]
        self.area += self.shape.bytes_of[kind] * steps
        self.longest = max(self.longest, steps)
        for line, seconds in enumerate(self.shape.seconds_of[kind]):
            self.spent[line] += seconds * steps

    @property
    def seconds(self) -> float:
        rounds = max(self.area / self.shape.free, self.longest)
        return max(
            fixed * rounds + spent
            for fixed, spent in zip(self.shape.fixed, self.spent, strict=True)
        )

    def changed(self, out: int | None, into: int | None) -> float:
        """Bounds the time without one kind and with another one, by their sums."""
        shape, area = self.shape, self.area
        spent = list(self.spent)
        for kind, sign in ((out, -1), (into, 1)):
            if kind is not None:
                steps = sign * self.steps[kind]
                area += shape.bytes_of[kind] * steps
                for line, seconds in enumerate(shape.seconds_of[kind]):
                    spent[line] += seconds * steps
        rounds = area / shape.free
        return max(
            fixed * rounds + used
            for fixed, used in zip(shape.fixed, spent, strict=True)
        )


def _whole(kinds: Kinds, mix: GroupMix) -> list[tuple[Shape, int, list[int]]]:
    """Rounds the shares of a mix to whole configurations.

    Returns:
        Shape, number of groups and kinds of each class.
    """
    queues: dict = {one: [] for one in mix.num_groups}
    for kind, count in enumerate(kinds.count):
        shares = {
            one: of[kind] for one, of in mix.shares.items() if of.get(kind, 0.0) > 0
        }
        number = {one: int(share + 1e-6) for one, share in shares.items()}
        by_rest = sorted(shares, key=lambda one: number[one] - shares[one])
        left = count - sum(number.values())
        for i in range(left):
            number[by_rest[i % len(by_rest)]] += 1
        for one in shares:
            queues[one] += [kind] * number[one]
    return [
        (shape, mix.num_groups[shape, rounds], queue)
        for (shape, rounds), queue in queues.items()
    ]


def _deal(
    shape: Shape, steps: Sequence[int], num_groups: int, queue: Sequence[int]
) -> list[list[int]]:
    """Deals configurations to equal groups, longest first, to the least loaded."""
    out: list[list[int]] = [[] for _ in range(num_groups)]
    estimates = [_Estimate(shape, steps) for _ in range(num_groups)]
    heap = [(0.0, i) for i in range(num_groups)]
    for kind in sorted(queue, key=lambda k: (-steps[k], -shape.bytes_of[k], k)):
        i = heapq.heappop(heap)[1]
        out[i].append(kind)
        estimates[i].add(kind)
        heapq.heappush(heap, (estimates[i].seconds, i))
    return out


class _Search:
    """Groups of a mix, and a local search on the one that ends last."""

    def __init__(self, kinds: Kinds, mix: GroupMix):
        self.kinds, self._steps = kinds, kinds.steps
        self._plays = _NUM_PLAYS
        self._known: dict[tuple, tuple[float, list[int]]] = {}
        self._shapes: list[Shape] = []
        self._queues: list[list[int]] = []
        for shape, number, queue in _whole(kinds, mix):
            self._shapes += [shape] * number
            self._queues += _deal(shape, self._steps, number, queue)
        idle = kinds.sweep.num_gpus - sum(shape.degree for shape in self._shapes)
        for degree in reversed(kinds.degrees):
            number, idle = divmod(idle, degree)
            self._shapes += [kinds.shape(degree, kinds.slot_ranks[-1])] * number
            self._queues += [[] for _ in range(number)]
        every = range(len(self._queues))
        self._times = [self._play(i, self._queues[i])[0] for i in every]
        self._estimates = [self._estimate(i) for i in every]

    @property
    def makespan(self) -> float:
        return max(self._times)

    def run(self, goal: float) -> None:
        """Improves the groups until they end by `goal`, or nothing helps."""
        while self.makespan > goal and self._improve():
            pass

    def plan(self) -> SweepPlan:
        """Makes the plan, widest groups first."""
        used = [i for i, queue in enumerate(self._queues) if queue]
        used.sort(key=lambda i: (-self._shapes[i].degree, -self._shapes[i].slot_rank))
        roster, groups = Roster(self.kinds), []
        numbers = number_gpus([self._shapes[i].degree for i in used])
        for i, gpus in zip(used, numbers, strict=True):
            seconds, queue = self._play(i, self._queues[i])
            shape = self.kinds.shrink(self._shapes[i], queue)
            shrunk = self._best(shape, queue)
            if shrunk[0] <= seconds:
                queue = shrunk[1]
            else:
                shape = self._shapes[i]
            groups.append(roster.group(shape, gpus, queue))
        return SweepPlan(sweep=self.kinds.sweep, groups=tuple(groups))

    def _play(self, group: int, kinds: Sequence[int]) -> tuple[float, list[int]]:
        """Returns the time of a group with some kinds, and their best order."""
        key = self._shapes[group], tuple(sorted(kinds))
        if key not in self._known:
            self._plays -= 1
            self._known[key] = self._best(self._shapes[group], key[1])
        return self._known[key]

    def _best(self, shape: Shape, kinds: Sequence[int]) -> tuple[float, list[int]]:
        steps, size = self._steps, shape.bytes_of
        orders = (
            sorted(kinds, key=lambda k: (-steps[k], -size[k], k)),
            sorted(kinds, key=lambda k: (-steps[k] * size[k], k)),
            sorted(kinds, key=lambda k: (-size[k], -steps[k], k)),
        )
        played = [(play(shape, steps, order)[0], order) for order in orders]
        return min(played, key=lambda one: one[0])

    def _estimate(self, group: int) -> _Estimate:
        return _Estimate(self._shapes[group], self._steps, self._queues[group])

    def _improve(self) -> bool:
        """Makes the first change that shortens the group that ends last."""
        last = max(range(len(self._times)), key=lambda i: self._times[i])
        limit = self._times[last] * (1 - 1e-6)
        for _, other, out, into in sorted(self._changes(last, limit)):
            if self._plays <= 0:
                return False
            ours, theirs = list(self._queues[last]), list(self._queues[other])
            ours.remove(out)
            theirs.append(out)
            if into >= 0:
                theirs.remove(into)
                ours.append(into)
            if self._play(other, theirs)[0] < limit and (
                self._play(last, ours)[0] < limit
            ):
                for group, queue in ((last, ours), (other, theirs)):
                    self._queues[group] = queue
                    self._times[group] = self._play(group, queue)[0]
                    self._estimates[group] = self._estimate(group)
                return True
        return False

    def _changes(
        self, last: int, limit: float
    ) -> Iterator[tuple[float, int, int, int]]:
        """Yields changes that may help.

        Yields:
            The bound of the later end, the other group, the kind that it gets, and the
            kind that it gives; -1: none.
        """
        others = sorted(range(len(self._times)), key=lambda i: self._times[i])[:_NEAR]
        ours, mine = self._estimates[last], sorted(set(self._queues[last]))
        for other in others:
            if other == last:
                continue
            theirs = self._estimates[other]
            for into in (None, *sorted(set(self._queues[other]))):
                if into is not None and not self._shapes[last].fits[into]:
                    continue
                for out in mine:
                    if out == into or not self._shapes[other].fits[out]:
                        continue
                    least = max(ours.changed(out, into), theirs.changed(into, out))
                    if least < limit:
                        yield least, other, out, -1 if into is None else into

"""Plans a sweep: groups of GPUs whose slots are refilled as configurations end.

Layouts of groups come from the program that bounds the makespan (`bound`), for
makespans at and slightly above the bound, from equal groups, and from splitting and
merging groups of these. Simulated annealing then moves configurations between groups
and within their queues. All layouts get a little of it, the best of them more, and the
best few most.
"""

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence

from jaxlora.scheduler.sweep.bound import GroupMix, find_bound, find_mix
from jaxlora.scheduler.sweep.problem import Bound, Costs, Sweep, SweepPlan
from jaxlora.scheduler.sweep.rounds import Kinds, Roster, Shape, play

# Makespans of further layouts, over the first one.
_TARGETS = (1.01, 1.02, 1.05, 1.1, 1.15)
_MOST_LAYOUTS, _MOST_STARTS = 16, 20  # tried, and annealed
_GOOD_ENOUGH = 1.005  # over the bound
# How often annealing plays each configuration, or as many as here; and the layouts that
# go on.
_ROUNDS, _MOST_PLAYED = ((160, 6), (800, 2), (3200, 1)), 240
_HEAT, _COLD = 0.01, 0.0003  # relative rises of the makespan that are accepted
_FULL = 0.95  # share of the goal up to which similar configurations share a group
_NEAR = 8  # groups that end first and get more configurations
_NORM = 40  # of the ends of all groups, which stands for the makespan


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
    and of played configurations, never seconds.

    Args:
        sweep: Configurations and GPUs.
        costs: Time and memory of groups.

    Raises:
        ValueError: A configuration fits into no group.
    """
    kinds = Kinds(sweep, costs)
    bound, makespan, mix = find_bound(kinds)
    goal = _GOOD_ENOUGH * bound.fixed_groups
    found = [_Groups.of_mix(kinds, mix)]
    if found[0].makespan > goal:
        for target in _TARGETS:
            near, _ = find_mix(kinds, makespan * target)
            if near is not None:
                found.append(_Groups.of_mix(kinds, near))
        known = [one.layout for one in found]
        for layout in itertools.islice(_layouts(kinds, known), _MOST_LAYOUTS):
            dealt = (_Groups.dealt(kinds, layout, full) for full in (0.0, _FULL * goal))
            found += filter(None, dealt)
        found = sorted(found, key=lambda one: one.makespan)[:_MOST_STARTS]
    size = min(len(sweep.configurations), _MOST_PLAYED)
    for plays, kept in _ROUNDS:
        for one in found:
            if min(other.makespan for other in found) > goal:
                one.anneal(goal, plays * size)
        found = sorted(found, key=lambda one: one.makespan)[:kept]
    return PlannedSweep(plan=found[0].plan(), bound=bound)


type Layout = tuple[int, ...]  # degrees of the groups, in descending order


def _layouts(kinds: Kinds, known: Iterable[Layout]) -> Iterator[Layout]:
    """Yields equal groups, and layouts that a split or a merger makes of others."""
    gpus, degrees = kinds.sweep.num_gpus, kinds.degrees
    equal = [
        (degree,) * (gpus // degree) + _rest(kinds, gpus % degree) for degree in degrees
    ]
    waiting = list(dict.fromkeys((*known, *equal)))
    seen = set(waiting)
    yield from waiting
    while waiting:
        layout = waiting.pop(0)
        for degree in sorted(set(layout)):
            changes: list[tuple[Layout, Layout]] = [((degree,), (degree // 2,) * 2)]
            if layout.count(degree) > 1:
                changes.append(((degree,) * 2, (2 * degree,)))
            for gone, come in changes:
                if come[0] not in degrees:
                    continue
                near = list(layout)
                for one in gone:
                    near.remove(one)
                new = tuple(sorted((*near, *come), reverse=True))
                if new not in seen:
                    seen.add(new)
                    waiting.append(new)
                    yield new


def _rest(kinds: Kinds, gpus: int) -> Layout:
    """Returns groups of the GPUs that others leave, the widest first."""
    out: list[int] = []
    for degree in reversed(kinds.degrees):
        number, gpus = divmod(gpus, degree)
        out += [degree] * number
    return tuple(out)


@dataclasses.dataclass(frozen=True, slots=True)
class _Load:
    """Sums over the configurations of a group.

    Attributes:
        shape: The group's shape.
        area: Bytes times steps.
        longest: Most steps of a configuration.
        spent: Seconds, by line of the maximum.
    """

    shape: Shape
    area: float = 0.0
    longest: int = 0
    spent: tuple[float, ...] = ()

    def plus(self, kind: int, steps: int) -> "_Load":
        added = self.shape.seconds_of[kind]
        spent = self.spent or (0.0,) * len(added)
        return _Load(
            self.shape,
            self.area + self.shape.bytes_of[kind] * steps,
            max(self.longest, steps),
            tuple([a + b * steps for a, b in zip(spent, added, strict=True)]),
        )

    @property
    def seconds(self) -> float:
        """A lower bound of the group's time."""
        rounds = max(self.area / self.shape.free, self.longest)
        pairs = zip(self.shape.fixed, self.spent, strict=True)
        return max([fixed * rounds + spent for fixed, spent in pairs])


def _deal(
    kinds: Kinds, shapes: Sequence[Shape], queue: Iterable[int], full: float = 0.0
) -> list[list[int]] | None:
    """Deals configurations to groups, those of the most steps first.

    Each group is filled up to `full` seconds, so that similar configurations share
    groups. The rest goes where it ends first, by the sums of loads.

    Returns:
        The queue of each group; None: a kind fits into none of them.
    """
    steps, size, rank = kinds.steps, shapes[0].bytes_of, kinds.rank
    by_rank = kinds.costs.pads_ranks and full > 0
    left = sorted(queue, key=lambda k: (-rank[k] * by_rank, -steps[k], -size[k], k))
    queues: list[list[int]] = [[] for _ in shapes]
    loads = [_Load(shape) for shape in shapes]
    if full > 0:
        i, rest = -1, []
        for kind in left:
            more = None if i < 0 else loads[i].plus(kind, steps[kind])
            if (more is None or more.seconds > full) and i + 1 < len(shapes):
                i += 1
                loads[i] = _Load(kinds.shrink(shapes[i], [kind]))
                more = loads[i].plus(kind, steps[kind])
            assert more is not None
            if shapes[i].fits[kind] and more.seconds <= full:
                queues[i].append(kind)
                loads[i] = more
            else:
                rest.append(kind)
        left = rest
    heaps: dict[Shape, list[tuple[float, int]]] = {shape: [] for shape in shapes}
    for i, shape in enumerate(shapes):
        heapq.heappush(heaps[shape], (loads[i].seconds if queues[i] else 0.0, i))
    for kind in left:
        first = [heap[0][1] for shape, heap in heaps.items() if shape.fits[kind]]
        more = {i: loads[i].plus(kind, steps[kind]) for i in first}
        if not more:
            return None
        i = min(more, key=lambda i: (more[i].seconds, i))
        queues[i].append(kind)
        loads[i] = more[i]
        heapq.heapreplace(heaps[shapes[i]], (loads[i].seconds, i))
    return queues


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


class _Groups:
    """Groups of a layout with the queues of their configurations."""

    def __init__(
        self, kinds: Kinds, degrees: Sequence[int], queues: Sequence[list[int]]
    ):
        self._kinds, self._degrees = kinds, degrees
        self._random = random.Random(0)
        # Queues are replaced, never changed, so that a copy of the list stays.
        self._queues = list(queues)
        self._ends = [self._end(i, queue) for i, queue in enumerate(queues)]
        self._best = list(self._queues)
        self.makespan = max(self._ends)
        self._early = self._first()

    @classmethod
    def of_mix(cls, kinds: Kinds, mix: GroupMix) -> "_Groups":
        """Deals the configurations of each class to its groups."""
        degrees, queues = [], []
        for shape, number, queue in _whole(kinds, mix):
            dealt = _deal(kinds, [shape] * number, queue)
            assert dealt is not None, "the program knows what fits"
            degrees += [shape.degree] * number
            queues += dealt
        rest = _rest(kinds, kinds.sweep.num_gpus - sum(degrees))
        return cls(kinds, [*degrees, *rest], [*queues, *([] for _ in rest)])

    @classmethod
    def dealt(cls, kinds: Kinds, layout: Layout, full: float) -> "_Groups | None":
        """Deals all configurations (`_deal`); None: one fits into no group."""
        shapes = [kinds.shape(degree, kinds.slot_ranks[-1]) for degree in layout]
        each = [k for k, count in enumerate(kinds.count) for _ in range(count)]
        queues = _deal(kinds, shapes, each, full)
        return None if queues is None else cls(kinds, layout, queues)

    @property
    def layout(self) -> Layout:
        """Degrees of the groups."""
        return tuple(sorted(self._degrees, reverse=True))

    def plan(self) -> SweepPlan:
        """Makes the plan of the best queues, widest groups first."""
        used = [i for i, queue in enumerate(self._best) if queue]
        shapes = {i: self._shape(i, self._best[i]) for i in used}
        used.sort(key=lambda i: (-shapes[i].degree, -shapes[i].slot_rank))
        roster = Roster(self._kinds)
        ends = itertools.accumulate(shapes[i].degree for i in used)
        groups = tuple(
            roster.group(
                shapes[i], tuple(range(end - shapes[i].degree, end)), self._best[i]
            )
            for i, end in zip(used, ends, strict=True)
        )
        return SweepPlan(sweep=self._kinds.sweep, groups=groups)

    def anneal(self, goal: float, work: int) -> None:
        """Changes queues at random until the makespan is at the goal, in seconds.

        As many configurations are played as `work` says.
        """
        self._queues = list(self._best)
        self._ends = [self._end(i, queue) for i, queue in enumerate(self._queues)]
        unit, draw = self.makespan, self._random.random
        # The more groups there are, the less one of them may add to the makespan.
        scale = min(1.0, (_NEAR / len(self._ends)) ** 2)
        total, left = self._norm(range(len(self._ends)), unit), work
        while left > 0 and self.makespan > goal:
            changed = self._change()
            if changed is None:
                left -= 1
                continue
            heat = scale * _COLD * (_HEAT / _COLD) ** (left / work)
            # A change is taken if it makes the norm longer by no more than that.
            limit = total * math.exp(-_NORM * heat * math.log(1 - draw()))
            norm = total - self._norm(changed, unit)
            ends = {}
            for i, queue in changed.items():
                left -= len(queue) + 1
                ends[i] = self._end(i, queue)
                norm += (ends[i] / unit) ** _NORM
                if norm > limit:
                    break
            else:
                total = norm
                for i, queue in changed.items():
                    self._queues[i], self._ends[i] = queue, ends[i]
                self._early = self._first()
                if (last := max(self._ends)) < self.makespan:
                    self.makespan, self._best = last, list(self._queues)

    def _first(self) -> list[int]:
        """Returns the groups that end first, which configurations move to."""
        return sorted(range(len(self._ends)), key=self._ends.__getitem__)[:_NEAR]

    def _norm(self, groups: Iterable[int], unit: float) -> float:
        return sum((self._ends[i] / unit) ** _NORM for i in groups)

    def _change(self) -> dict[int, list[int]] | None:
        """Draws a change: of the order in a queue, a move, or an exchange.

        Returns:
            The new queues of the groups that change; None: a draw that is no change.
        """
        draw, queues, number = self._random.random, self._queues, len(self._queues)
        one = other = int(number * draw())
        if draw() < 0.5:
            one = max(range(number), key=self._ends.__getitem__)
        if not queues[one]:
            return None
        ours = list(queues[one])
        i = int(len(ours) * draw())
        way = draw()
        if number == 1 or way < 0.3:
            kind = ours.pop(i)
            ours.insert(int((len(ours) + 1) * draw()), kind)
            return {one: ours} if ours != queues[one] else None
        other = self._early[int(len(self._early) * draw())]
        if other == one:
            return None
        theirs = list(queues[other])
        if way < 0.65 or not theirs:
            theirs.insert(int((len(theirs) + 1) * draw()), ours.pop(i))
        else:
            j = int(len(theirs) * draw())
            if ours[i] == theirs[j]:
                return None
            ours[i], theirs[j] = theirs[j], ours[i]
        return {other: theirs, one: ours}

    def _shape(self, group: int, queue: Sequence[int]) -> Shape:
        largest = self._kinds.shape(self._degrees[group], self._kinds.slot_ranks[-1])
        return self._kinds.shrink(largest, queue)

    def _end(self, group: int, queue: Sequence[int]) -> float:
        """Returns the end of a group; infinite if a configuration does not fit."""
        if not queue:
            return 0.0
        shape = self._shape(group, queue)
        if not all(map(shape.fits.__getitem__, queue)):
            return math.inf
        return play(shape, self._kinds.steps, queue)[0]

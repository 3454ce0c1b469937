"""Rounds of a group: the time of configurations whose slots are refilled."""

import dataclasses
import heapq
from collections.abc import Sequence

from jaxlora.scheduler.sweep.problem import Configuration, Costs, Group, Run, Sweep

_FITS = 1 + 1e-9  # of memory, for rounding


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Shape:
    """Costs of every kind of configuration in a group of given degree and slot rank.

    Attributes:
        degree: Number of GPUs.
        slot_rank: Rank of the slots.
        free: Bytes for configurations, with a tolerance for rounding.
        fixed: Seconds of an empty round, by line.
        bytes_of: Bytes, by kind.
        seconds_of: Seconds added to a round, by kind and line.
        fits: Whether the group can run a kind at all.
    """

    degree: int
    slot_rank: int
    free: float
    fixed: tuple[float, ...]
    bytes_of: list[float]
    seconds_of: list[tuple[float, ...]]
    fits: list[bool]

    def round_alone(self, kind: int) -> float:
        """Returns the seconds of a round of one configuration alone."""
        return max(
            a + b for a, b in zip(self.fixed, self.seconds_of[kind], strict=True)
        )


class Kinds:
    """The configurations of a sweep by kind, and the costs of each kind.

    Configurations of one kind differ in nothing that costs time or memory, so that a
    planner only has to count them.
    """

    def __init__(self, sweep: Sweep, costs: Costs):
        """Groups the configurations.

        Raises:
            ValueError: A configuration fits into no group.
        """
        self.sweep, self.costs = sweep, costs
        members: dict[tuple, list[Configuration]] = {}
        for c in sweep.configurations:
            key = c.num_steps, c.rank, c.batch_size, c.sample_tokens
            members.setdefault(key, []).append(c)
        self.members = [members[key] for key in sorted(members, reverse=True)]
        self.first = [same[0] for same in self.members]
        self.count = [len(same) for same in self.members]
        self.steps = [c.num_steps for c in self.first]
        self.rank = [c.rank for c in self.first]
        ranks = sorted(set(self.rank))
        self.slot_ranks = ranks if costs.pads_ranks else ranks[-1:]
        self.degrees = [d for d in sweep.degrees if costs.free_bytes(d) > 0]
        self._shapes = {
            (d, r): _shape(self.first, costs, d, r)
            for d in self.degrees
            for r in self.slot_ranks
        }
        for kind, c in enumerate(self.first):
            if not any(s.fits[kind] for s in self.shapes):
                raise ValueError(
                    f"configuration {c.name!r} fits into no group of up to "
                    f"{sweep.degrees[-1]} GPUs. Lower its batch size or rank, or allow "
                    "larger groups."
                )

    def __len__(self) -> int:
        return len(self.first)

    @property
    def shapes(self) -> list[Shape]:
        """All shapes that a group may have."""
        return list(self._shapes.values())

    def shape(self, degree: int, slot_rank: int) -> Shape:
        """Returns the shape of this degree whose slots have this rank.

        Raises:
            ValueError: No group has this degree.
        """
        if degree not in self.degrees:
            raise ValueError(
                f"there are no groups of {degree} GPUs: the sweep has "
                f"{self.sweep.num_gpus}, and the base model fits into {self.degrees}."
            )
        return self._shapes[degree, slot_rank]

    def smallest(self, degree: int) -> list[Shape]:
        """Returns the shape of this degree with the smallest slots of each kind."""
        return [
            self.shape(degree, min(r for r in self.slot_ranks if r >= rank))
            for rank in self.rank
        ]

    def shrink(self, shape: Shape, queue: Sequence[int]) -> Shape:
        """Returns the shape with the smallest slots that hold the queue's kinds."""
        if not self.costs.pads_ranks:
            return shape
        return self.shape(shape.degree, max(self.rank[kind] for kind in queue))


def _shape(
    first: Sequence[Configuration], costs: Costs, degree: int, slot_rank: int
) -> Shape:
    free = costs.free_bytes(degree) * _FITS
    bytes_of = [costs.bytes_of(c, degree, slot_rank) for c in first]
    return Shape(
        degree=degree,
        slot_rank=slot_rank,
        free=free,
        fixed=costs.fixed_seconds(degree),
        bytes_of=bytes_of,
        seconds_of=[costs.seconds_of(c, degree, slot_rank) for c in first],
        fits=[
            c.rank <= slot_rank and size <= free
            for c, size in zip(first, bytes_of, strict=True)
        ],
    )


def play(
    shape: Shape, steps: Sequence[int], queue: Sequence[int]
) -> tuple[float, list[tuple[float, float]]]:
    """Plays the rounds of a group whose slots are refilled as configurations end.

    Whenever there is room, the first kinds of the queue that fit start.

    Returns:
        The seconds until the last one ends, and start and end of each.
    """
    free, seconds, now = shape.free, 0.0, 0
    bytes_of, seconds_of = shape.bytes_of, shape.seconds_of
    smallest = min([bytes_of[kind] for kind in queue], default=0.0)
    loads = list(shape.fixed)
    lines = range(len(loads))
    waiting = list(range(len(queue)))
    running: list[tuple[int, int]] = []
    starts, ends = [0.0] * len(queue), [0.0] * len(queue)
    while waiting or running:
        later = []
        for at, i in enumerate(waiting):
            if free < smallest:
                later += waiting[at:]
                break
            kind = queue[i]
            if bytes_of[kind] > free:
                later.append(i)
                continue
            free -= bytes_of[kind]
            starts[i] = seconds
            heapq.heappush(running, (now + steps[kind], i))
            added = seconds_of[kind]
            for line in lines:
                loads[line] += added[line]
        waiting = later
        end = running[0][0]
        seconds += (end - now) * max(loads)
        now = end
        while running and running[0][0] == end:
            i = heapq.heappop(running)[1]
            ends[i] = seconds
            kind = queue[i]
            free += bytes_of[kind]
            added = seconds_of[kind]
            for line in lines:
                loads[line] -= added[line]
    return seconds, list(zip(starts, ends, strict=True))


class Roster:
    """Hands out the configurations of each kind, in the order of the sweep."""

    def __init__(self, kinds: Kinds):
        self._kinds = kinds
        self._left = [iter(same) for same in kinds.members]

    def group(
        self,
        shape: Shape,
        gpus: tuple[int, ...],
        queue: Sequence[int],
        start: float = 0.0,
    ) -> Group:
        """Makes the group that plays a queue of kinds from `start` on."""
        seconds, spans = play(shape, self._kinds.steps, queue)
        slots: list[float] = []  # the time at which each is free
        runs = []
        for i in sorted(range(len(queue)), key=lambda i: (spans[i][0], i)):
            begin, end = spans[i]
            free = (s for s, time in enumerate(slots) if time <= begin)
            slot = next(free, len(slots))
            slots[slot : slot + 1] = [end]
            runs.append(
                Run(
                    configuration=next(self._left[queue[i]]),
                    slot=slot,
                    start=start + begin,
                    end=start + end,
                )
            )
        return Group(
            gpus=gpus,
            start=start,
            end=start + seconds,
            slot_rank=max(self._kinds.rank[kind] for kind in queue),
            runs=tuple(runs),
        )

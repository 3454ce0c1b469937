"""Fills the ticks of replicas whose microbatches differ in size.

A sample runs where it fits. Samples that only a large replica can hold go there first.
All others go to the smallest microbatches first: a compiled microbatch takes the same
time however it is filled, so a small one wastes less, and large ones keep their room
for the long samples of other jobs.
"""

from collections import Counter
from collections.abc import Sequence

from jaxlora.scheduler.lanes import Lane, Lanes, Tick
from jaxlora.scheduler.pack.fill import best_subsets
from jaxlora.scheduler.pack.jobs import Item, JobQueue
from jaxlora.scheduler.types import Limits, Sample, in_order

# A stream plans as many ticks at once.
_NUM_TICKS = 24
# Jobs that may be looked at to fill a tick.
_MAX_JOBS = 64


def fill_replicas(
    jobs: JobQueue, limits: Limits, lanes: Lanes, *, first_tick: int = 0
) -> list[Tick]:
    """Fills the next ticks, of which there is at least one.

    Jobs in the middle of a batch come first, then the jobs that need the most ticks.
    The ticks follow from the arguments alone, and not from which replica is ahead.
    """
    ticks: list[Tick] = []
    while jobs and len(ticks) < _NUM_TICKS:
        tick = first_tick + len(ticks)
        open_lanes = lanes.open_lanes(tick)
        filled = _Filling(jobs, tick, open_lanes, limits)
        filled.place_long()
        filled.place_others()
        filled.take(lanes.pipeline.distance)
        parts = {lane.number: filled.samples[lane.number] for lane in open_lanes}
        ticks.append(tuple(in_order(parts.get(n, [])) for n in range(lanes.num_lanes)))
    return ticks


class _Filling:
    """A tick while it is filled.

    Attributes:
        samples: The samples of each lane, by its number.
    """

    def __init__(
        self, jobs: JobQueue, tick: int, lanes: Sequence[Lane], limits: Limits
    ):
        self._jobs, self._tick, self._limits = jobs, tick, limits
        # Small lanes first. Those of several replicas take turns, so that replicas of
        # the same size get the same number of microbatches.
        self._lanes = sorted(lanes, key=lambda one: (one.capacity, one.turn))
        self.samples: dict[int, list[Sample]] = {lane.number: [] for lane in lanes}
        # By lane, the tokens of each job.
        self._tokens: dict[int, Counter[int]] = {n: Counter() for n in self.samples}
        candidates = jobs.first(tick, _MAX_JOBS)
        self._items = {job: jobs[job].items for job in candidates}
        # Places of the items of each job that are on no lane yet.
        self._left = {job: list(range(len(one))) for job, one in self._items.items()}

    def place_long(self) -> None:
        """Places the samples that do not fit on the smallest lanes, the longest first.

        A sample goes to the smallest lane that has room for it.
        """
        smallest = self._lanes[0].capacity
        for job, items in self._items.items():
            for place, item in enumerate(items):
                if self._limits.padded(item[1]) <= smallest:
                    continue
                for lane in self._lanes:
                    if item[1] <= self._room(lane, job):
                        self._place(lane, job, [place])
                        break

    def place_others(self) -> None:
        """Fills lane after lane with samples of one job after the other."""
        for lane in self._lanes:
            for job, left in self._left.items():
                if left:
                    chosen = _choose(self._items[job], left, self._room(lane, job))
                    self._place(lane, job, chosen)

    def take(self, distance: int) -> None:
        """Advances the jobs by the samples that were placed."""
        for job, left in self._left.items():
            placed = sorted(set(range(len(self._items[job]))).difference(left))
            if placed:
                self._jobs.take(job, placed, self._tick, distance)

    def _room(self, lane: Lane, job: int) -> int:
        """Returns the tokens of a job that a lane has room for, in whole blocks."""
        tokens = self._tokens[lane.number]
        if job not in tokens and len(tokens) >= self._limits.most_jobs:
            return 0
        others = sum(self._limits.padded(n) for own, n in tokens.items() if own != job)
        return lane.capacity - others - tokens[job]

    def _place(self, lane: Lane, job: int, places: Sequence[int]) -> None:
        if not places:
            return
        items = self._items[job]
        self.samples[lane.number] += [items[place][2] for place in places]
        self._tokens[lane.number][job] += sum(items[place][1] for place in places)
        placed = set(places)
        self._left[job] = [place for place in self._left[job] if place not in placed]


def _choose(items: Sequence[Item], left: Sequence[int], room: int) -> list[int]:
    """Returns the places of the samples, of those that are left, that fill the room."""
    fitting = [place for place in left if items[place][1] <= room]
    tokens = [items[place][1] for place in fitting]
    if sum(tokens) <= room:
        return fitting
    return [fitting[i] for i in sorted(next(best_subsets(tokens, room), []))]

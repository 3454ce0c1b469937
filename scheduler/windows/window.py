"""Fills the slots of a window, and improves them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.simulate import slowest_per_cycle
from jaxlora.scheduler.types import Limits, Pipeline
from jaxlora.scheduler.windows.cursor import Item
from jaxlora.scheduler.windows.fill import fill_slot
from jaxlora.scheduler.windows.job_queue import JobQueue
from jaxlora.scheduler.windows.local_search import LocalSearch
from jaxlora.scheduler.windows.polish import (
    POLISHED_SLOTS,
    POLISHED_STRIDE,
    Polish,
)
from jaxlora.scheduler.windows.ramps import Ramps
from jaxlora.scheduler.windows.segment import Segment

# With so many jobs, almost every filling is good: a quarter of the look ahead and no
# trades cost less than 0.1 % of the time.
CROWD = 64

_FILL_TARGETS = (
    1.06, 1.03, 1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """The effort that planning may take.

    The limits are counts, not times, so the same input always gets the same plan.

    Attributes:
        committed: Work that a window adds to the plan, in full microbatches.
        lookahead: Additional work that is planned to judge the window, in full
            microbatches.
        fill_targets: Work to which microbatches are filled, as fractions of the
            capacity. Squared lengths count as additional work, so the work of a full
            microbatch may exceed 1. With buckets, the bucket sizes are used instead.
        trades_per_slot: Number of trades per slot that local search may try.
        polish_rounds: Number of rounds in which slots near fill, drain and no-ops are
            polished on the simulated makespan. With 0, batches that run alone get no
            ramps either.
    """

    committed: int = 24
    lookahead: int = 32
    fill_targets: tuple[float, ...] = _FILL_TARGETS
    trades_per_slot: int = 12
    polish_rounds: int = 40

    def __post_init__(self):
        if self.committed < 1 or self.lookahead < 0:
            raise ValueError(
                f"committed={self.committed} must be positive and "
                f"lookahead={self.lookahead} must not be negative."
            )
        if not self.fill_targets or min(self.fill_targets) <= 0:
            raise ValueError(
                f"fill_targets={self.fill_targets} must be positive, and at least one "
                "is needed."
            )


DEFAULT_EFFORT = Effort()


# A filled slot: (items, tokens padded to the bucket, sum of squared lengths).
Slot = tuple[Sequence[Item], int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The state of planning between two slots.

    Attributes:
        jobs: Progress of each job.
        slot: Number of the next slot.
        before: The last slots, which still share the pipeline with the next one.
    """

    jobs: JobQueue
    slot: int
    before: list[Slot]


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """A plan for the next slots.

    Attributes:
        slots: The slots, including those that are only planned as lookahead.
        num_committed: Number of slots that become part of the plan.
        after: State after the committed slots.
        work: Total work after each slot.
        time: Total time after each slot. If no work is left, the last entry includes
            the time in which the pipeline drains.
    """

    slots: list[Slot]
    num_committed: int
    after: State
    work: np.ndarray
    time: np.ndarray

    @property
    def committed(self) -> list[Slot]:
        """The slots that become part of the plan."""
        return self.slots[: self.num_committed]


def drains(pipeline: Pipeline, cost: CostModel) -> bool:
    """Whether the sizes of microbatches matter where a pipeline fills and drains.

    Nothing drains between two batches with a distance below the number of stages, and
    with a single compiled shape all microbatches take the same time.
    """
    return 1 < pipeline.num_stages <= pipeline.distance and len(cost.buckets) != 1


class WindowFiller:
    """Fills the slots of windows with a given target, and improves them."""

    def __init__(
        self, limits: Limits, pipeline: Pipeline, cost: CostModel, effort: Effort
    ):
        """Stores what all windows share.

        Args:
            limits: Capacity and block size.
            pipeline: Stages, and distance between the batches of a job.
            cost: Costs of microbatches.
            effort: How hard to plan.
        """
        self._limits, self._pipeline = limits, pipeline
        self._cost, self._effort = cost, effort
        polishes = drains(pipeline, cost) and effort.polish_rounds > 0
        self._ramps = Ramps(limits, pipeline, cost) if polishes else None

    def runs_alone(self, jobs: JobQueue) -> int | None:
        """Returns the job that has the pipeline for a whole batch, if there is one."""
        if self._ramps is None or len(jobs) != 1:
            return None
        ((index, job),) = jobs.running()
        return None if job.is_started else index

    def _next_slots(self, jobs: JobQueue, slot: int, target: int) -> list[list[Item]]:
        """Fills the next slot, or those of the next batch if it runs alone."""
        distance, alone = self._pipeline.distance, self.runs_alone(jobs)
        if alone is None or self._ramps is None:
            return [fill_slot(jobs, slot, target, self._limits, distance)]
        job = jobs[alone]
        out: list[list[Item]] = [[] for _ in range(slot, job.ready)]
        for indices in self._ramps.split(job.items):
            out.append([job.items[i] for i in indices])
        jobs.take(alone, range(len(job.items)), slot + len(out) - 1, distance)
        return out

    def fill(self, state: State, target: int, lookahead: int) -> Window:
        """Fills the slots of a window one by one.

        Args:
            state: The state in which the window starts.
            target: Work to fill each slot with.
            lookahead: Work to plan beyond the committed work, in full microbatches.
        """
        jobs = state.jobs.copy()
        committed = self._effort.committed * self._limits.capacity
        stop = committed + lookahead * self._limits.capacity
        slots: list[Slot] = []
        work, done = [], 0
        after = None
        while done < stop and jobs:
            if after is None and done >= committed:
                after = len(slots), jobs.copy()
            for items in self._next_slots(jobs, state.slot + len(slots), target):
                slots.append(self.slot(items))
                done += sum(i[0] for i in items)
                work.append(done)
        is_done = not jobs
        if after is None or is_done:
            after = len(slots), jobs
        num, jobs_after = after
        before = self._in_pipeline(state.before + slots[:num])
        return Window(
            slots=slots,
            num_committed=num,
            after=State(jobs_after, state.slot + num, before),
            work=np.array(work),
            time=self._times(state.before, slots, is_done),
        )

    def slot(self, items: list[Item]) -> Slot:
        """Returns a filled slot."""
        tokens: dict[int, int] = {}
        for _, n, sample in items:
            tokens[sample.owner] = tokens.get(sample.owner, 0) + n
        padded = sum(map(self._limits.padded, tokens.values()))
        bucket_tokens = self._cost.bucket_tokens(padded)
        return items, bucket_tokens, sum(n * n for _, n, _ in items)

    def _times(
        self, before: list[Slot], slots: list[Slot], is_done: bool
    ) -> np.ndarray:
        """Returns the total time after each slot; see `Window.time`."""
        in_order = before + slots
        tokens = np.array([s[1] for s in in_order], float)
        squares = np.array([s[2] for s in in_order], float)
        is_real = np.array([bool(s[0]) for s in in_order], float)
        forward, backward = self._cost.times(tokens, squares, is_real)
        cycles = slowest_per_cycle(forward + backward)
        time = cycles[len(before) : len(in_order)].cumsum()
        if is_done:
            time[-1] += cycles[len(in_order) :].sum()
        return time

    @property
    def context(self) -> int:
        """Full microbatches that must follow a window for it to be polished."""
        return self._pipeline.num_stages if self._ramps else 0

    def makespan(self, plan: Window) -> float:
        """Returns the simulated makespan of a plan on its own."""
        tokens = np.array([slot[1] for slot in plan.slots], float)
        squares = np.array([slot[2] for slot in plan.slots], float)
        whole = Segment(tokens, squares, 0, len(tokens), self._cost, self._pipeline)
        return float(whole.makespans(tokens[:, None], squares[:, None])[0])

    def improve(self, state: State, plan: Window) -> Window:
        """Improves the committed slots of a plan by local search."""
        if not self._effort.trades_per_slot or len(state.jobs) >= CROWD:
            return plan
        num, num_after = plan.num_committed, self._pipeline.num_stages - 1
        search = LocalSearch(
            [list(s[0]) for s in plan.committed],
            self._earliest(state, plan.committed, 0),
            self._limits,
            self._pipeline,
            self._cost,
            before=[list(s[0]) for s in state.before],
            after=[list(s[0]) for s in plan.slots[num : num + num_after]],
        )
        found = search.run(self._effort.trades_per_slot * num)
        slots = [self.slot(items) for items in found]
        return self._with_committed(state, plan, slots)

    def _with_committed(self, state: State, plan: Window, slots: list[Slot]) -> Window:
        """Returns a plan with other committed slots, which hold the same items."""
        last: dict[int, dict[int, int]] = {}
        for i, slot in enumerate(slots):
            for _, _, sample in slot[0]:
                last.setdefault(sample.owner, {})[sample.batch] = state.slot + i
        jobs = plan.after.jobs
        for index, x in list(jobs.changed()):
            # Only the last of the earlier batches matters, which is the latest.
            ends = last.get(x.job, {}) if x.items else {}
            earlier = [slot for batch, slot in ends.items() if batch < x.batch]
            ready = max(earlier, default=None)
            if ready is not None and ready + self._pipeline.distance != x.ready:
                jobs.replace(index, ready=ready + self._pipeline.distance)
        after = dataclasses.replace(
            plan.after,
            slot=state.slot + len(slots),
            before=self._in_pipeline(state.before + slots),
        )
        return dataclasses.replace(
            plan,
            slots=slots + plan.slots[plan.num_committed :],
            num_committed=len(slots),
            after=after,
        )

    def polish(self, state: State, plan: Window) -> Window:
        """Polishes the committed slots near fill, drain and no-ops."""
        if self._ramps is None:
            return plan
        num, num_before = plan.num_committed, len(state.before)
        is_done = not plan.after.jobs
        # Polishing may spread the first and the last items over more slots.
        more: list[Slot] = [((), 0, 0)] * self._pipeline.num_stages
        slots = [
            *state.before,
            *(more if state.slot == 0 else ()),
            *plan.slots,
            *(more if is_done else ()),
        ]
        num += len(slots) - len(plan.slots) - num_before
        parts = self._near_edges(slots, num_before, num_before + num)
        if not parts:
            return plan
        polish = Polish(
            [list(slot[0]) for slot in slots],
            self._earliest(state, slots, num_before),
            self._limits,
            self._pipeline,
            self._cost,
        )
        for first, last in parts:
            polish.run(first, last, self._effort.polish_rounds)
        found = polish.result()[num_before : num_before + num]
        while is_done and found and not found[-1]:
            found.pop()
        while state.slot == 0 and found and not found[0]:
            del found[0]
        return self._with_committed(state, plan, [self.slot(x) for x in found])

    def _near_edges(
        self, slots: list[Slot], first: int, last: int
    ) -> list[tuple[int, int]]:
        """Returns overlapping parts of the slots [first, last) that are near no-ops."""
        near = self._pipeline.num_stages
        edges = [i for i, slot in enumerate(slots) if not slot[0]]
        parts = [
            (start, min(start + POLISHED_SLOTS, last))
            for start in range(first, last, POLISHED_STRIDE)
        ]
        return [
            (start, end)
            for start, end in parts
            if any(start - near <= edge < end + near for edge in edges)
        ]

    def _earliest(
        self, state: State, slots: list[Slot], num_before: int
    ) -> dict[int, int]:
        """Returns the slot, from the first of `slots`, in which each job may run.

        Args:
            state: The state in which a window starts.
            slots: Some slots before it, and its own.
            num_before: Number of slots before it.
        """
        jobs = {item[2].owner for slot in slots for item in slot[0]}
        first, index_of = state.slot - num_before, state.jobs.index_of
        # A job of the slots before it may have left.
        return {
            job: state.jobs[index_of[job]].ready - first if job in index_of else 0
            for job in jobs
        }

    def _in_pipeline(self, slots: list[Slot]) -> list[Slot]:
        return slots[-2 * self._pipeline.num_stages :]

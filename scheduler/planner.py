"""Plans microbatches window by window; jobs may join and leave between windows."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.cursor import BatchCursor, BatchSource, Item, WorkModel
from jaxlora.scheduler.fill import fill_slot
from jaxlora.scheduler.job_queue import JobQueue
from jaxlora.scheduler.local_search import LocalSearch
from jaxlora.scheduler.polish import Polish
from jaxlora.scheduler.ramps import Ramps
from jaxlora.scheduler.simulate import check_stages, slowest_per_cycle
from jaxlora.scheduler.types import Limits, Microbatch, Pipeline, Sample

# While the best target stays the same, other targets are tried again after this many
# windows.
_RETRY_INTERVAL = 4
# With many jobs, one more or less hardly changes the best target. The same number of
# jobs counts as another window before other targets are tried again.
_MANY_JOBS = 16
_MAX_INTERVAL = 16
# Slots that are polished together, and how far the next ones start after them.
_POLISHED_SLOTS = 24
_POLISHED_STRIDE = 16

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobBatches:
    """The global batches of a job, which are read as planning proceeds.

    Attributes:
        batches: Samples of each global batch, in order.
        num_batches: Number of batches.
        batch_tokens: Mean number of tokens in a batch, which may be an estimate.
    """

    batches: Iterable[Sequence[Sample]]
    num_batches: int
    batch_tokens: float


# A filled slot: (items, tokens padded to the bucket, sum of squared lengths).
Slot = tuple[Sequence[Item], int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
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
class _Window:
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
    after: _State
    work: np.ndarray
    time: np.ndarray

    @property
    def committed(self) -> list[Slot]:
        return self.slots[: self.num_committed]


class Planner:
    """Plans window by window; jobs may join, pause and resume between windows.

    A window is planned with several fill targets. For each one, its slots are filled
    one by one to that amount of work. The plan that finishes the window's work first
    wins, where time is the sum over all cycles of the slowest microbatch in the
    pipeline (`simulate.window_sum`). Local search then balances the first slots, which
    are committed. The other slots are planned again as part of the next window.
    """

    def __init__(
        self,
        limits: Limits,
        pipeline: Pipeline,
        cost: CostModel,
        effort: Effort = DEFAULT_EFFORT,
    ):
        """Starts without jobs.

        Args:
            limits: Capacity and block size.
            pipeline: Provides the distance between the batches of a job.
            cost: Costs of microbatches, which the planner minimizes.
            effort: How hard to plan.

        Raises:
            ValueError: The cost model and the pipeline differ in the number of stages.
        """
        check_stages(cost, pipeline)
        self.limits = limits
        self.pipeline = pipeline
        self.cost = cost
        self.effort = effort
        self._work = WorkModel.from_cost(cost)
        self._targets = _work_targets(limits, cost, effort.fill_targets)
        # Nothing drains between two batches with a shorter distance.
        drains = 1 < pipeline.num_stages <= pipeline.distance
        self._ramps = (
            Ramps(limits, pipeline, cost) if drains and effort.polish_rounds else None
        )
        self._state = _State(jobs=JobQueue(), slot=0, before=[((), 0, 0)])
        # Index of the last window's target, and for how many windows it stays.
        self._best: int | None = None
        self._num_fixed = 0
        self._num_jobs = 0
        # Index of each job in the queue.
        self._index: dict[int, int] = {}

    def add(self, job: JobBatches) -> None:
        """Adds a job, which is planned from the next window on.

        Raises:
            ValueError: The job was added before, or its first batch is invalid.
        """
        slots = job.batch_tokens / self.limits.capacity + self.pipeline.distance - 1
        slots = max(1.0, slots)  # two batches of a job never share a slot
        source = BatchSource(job.batches, self._work, self.limits)
        new = BatchCursor.at_start(
            source, num_batches=job.num_batches, slots_per_batch=slots
        )
        if source.job is None:
            return  # it has no batches
        if source.job in self._index:
            raise ValueError(f"job {source.job} was already added. Add each job once.")
        self._index[source.job] = self._state.jobs.add(new)

    def pause(self, job: int) -> None:
        """Pauses a job after its current batch.

        A batch that has started is always completed.

        Raises:
            ValueError: The job was not added.
        """
        self._state.jobs.replace(self._known(job), is_paused=True)

    def resume(self, job: int) -> None:
        """Resumes a paused job at its next batch.

        Raises:
            ValueError: The job was not added.
        """
        self._state.jobs.replace(self._known(job), is_paused=False)

    def next_window(self) -> list[Microbatch]:
        """Plans the next microbatches; the list is empty if no job has samples to run.

        Raises:
            ValueError: A batch that was read is invalid, for example because a sample
                is longer than the capacity.
        """
        if not self._state.jobs:
            return []
        plan = self._plan_window(self._state)
        self._state = plan.after
        for _, x in self._state.jobs.changed():
            x.source.forget_before(x.number)
        self._state.jobs.settle()
        return [_microbatch(s[0]) for s in plan.committed]

    def _known(self, job: int) -> int:
        """Returns the index of a job that was added."""
        if job not in self._index:
            raise ValueError(
                f"job {job} was not added. The jobs are {list(self._index)}."
            )
        return self._index[job]

    def _plan_window(self, state: _State) -> _Window:
        """Returns the best of the plans with different targets."""
        if self._runs_alone(state.jobs) is not None:
            best = self._best or 0
            return self._polish(state, self._fill(state, self._targets[best], 0))
        candidates = self._candidates(len(state.jobs))
        lookahead = self.effort.lookahead if len(candidates) > 1 else 0
        plans = {i: self._fill(state, self._targets[i], lookahead) for i in candidates}
        best = _fastest(plans)
        if (
            len(candidates) > 3
        ):  # a coarse grid, which is refined around its best target
            for i in self._around(best):
                if i not in plans:
                    plans[i] = self._fill(state, self._targets[i], lookahead)
            best = _fastest(plans)
        if len(candidates) == 1:
            self._num_fixed -= 1
        else:
            interval = _RETRY_INTERVAL if best == self._best else 1
            interval = max(interval, len(state.jobs) // _MANY_JOBS)
            self._num_fixed = min(interval, _MAX_INTERVAL) - 1
        self._best = best
        return self._polish(state, self._improve(state, plans[best]))

    def _candidates(self, num_jobs: int) -> Sequence[int]:
        """Returns the indices of the targets that a window tries first.

        The best target changes slowly while the number of jobs stays the same. So the
        first window tries every other target. Later ones try the neighbors of the best
        target, and once it is stable, only at intervals.
        """
        change = abs(num_jobs - self._num_jobs)
        if self._best is None or change > num_jobs // _MANY_JOBS:
            self._num_jobs = num_jobs
            return range(len(self._targets))[::2]
        if self._num_fixed:
            return [self._best]
        return self._around(self._best)

    def _around(self, best: int) -> Sequence[int]:
        return range(len(self._targets))[max(0, best - 1) : best + 2]

    def _improve(self, state: _State, plan: _Window) -> _Window:
        """Improves the committed slots of a plan by local search."""
        if not self.effort.trades_per_slot:
            return plan
        num, num_after = plan.num_committed, self.pipeline.num_stages - 1
        search = LocalSearch(
            [list(s[0]) for s in plan.committed],
            self._earliest(state, plan.committed, 0),
            self.limits,
            self.pipeline,
            self.cost,
            before=[list(s[0]) for s in state.before],
            after=[list(s[0]) for s in plan.slots[num : num + num_after]],
        )
        found = search.run(self.effort.trades_per_slot * num)
        slots = [self._slot(items) for items in found]
        return self._with_committed(state, plan, slots)

    def _with_committed(
        self, state: _State, plan: _Window, slots: list[Slot]
    ) -> _Window:
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
            if ready is not None and ready + self.pipeline.distance != x.ready:
                jobs.replace(index, ready=ready + self.pipeline.distance)
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

    def _polish(self, state: _State, plan: _Window) -> _Window:
        """Polishes the committed slots near fill, drain and no-ops."""
        if self._ramps is None:
            return plan
        num, num_before = plan.num_committed, len(state.before)
        is_done = not plan.after.jobs
        slots = state.before + plan.slots
        edges = [i for i, slot in enumerate(slots) if not slot[0]]
        if is_done:
            edges.append(len(slots))
            # Polishing may spread the last items over more slots.
            more = self.pipeline.num_stages
            slots, num = slots + [((), 0, 0)] * more, num + more
        polish = Polish(
            [list(slot[0]) for slot in slots],
            self._earliest(state, slots, num_before),
            self.limits,
            self.pipeline,
            self.cost,
        )
        near = self.pipeline.num_stages
        for first in range(num_before, num_before + num, _POLISHED_STRIDE):
            last = min(first + _POLISHED_SLOTS, num_before + num)
            if any(first - near <= edge < last + near for edge in edges):
                polish.run(first, last, self.effort.polish_rounds)
        found = polish.result()[num_before : num_before + num]
        while is_done and found and not found[-1]:
            found.pop()
        return self._with_committed(state, plan, [self._slot(x) for x in found])

    def _earliest(
        self, state: _State, slots: list[Slot], num_before: int
    ) -> dict[int, int]:
        """Returns the slot, from the first of `slots`, in which each job may run.

        Args:
            state: The state in which a window starts.
            slots: Some slots before it, and its own.
            num_before: Number of slots before it.
        """
        jobs = {item[2].owner for slot in slots for item in slot[0]}
        first = state.slot - num_before
        return {job: state.jobs[self._index[job]].ready - first for job in jobs}

    def _in_pipeline(self, slots: list[Slot]) -> list[Slot]:
        return slots[-2 * self.pipeline.num_stages :]

    def _runs_alone(self, jobs: JobQueue) -> BatchCursor | None:
        """Returns the job that has the pipeline for a whole batch, if there is one."""
        if self._ramps is None or len(jobs) > 1:
            return None
        job = jobs[jobs.only()]
        return None if job.is_started else job

    def _next_slots(
        self, jobs: JobQueue, slot: int, target: int
    ) -> list[list[Item]]:
        """Fills the next slot, or those of the next batch if it runs alone."""
        distance = self.pipeline.distance
        alone = self._runs_alone(jobs)
        if alone is None or self._ramps is None:
            return [fill_slot(jobs, slot, target, self.limits, distance)]
        out: list[list[Item]] = [[] for _ in range(slot, alone.ready)]
        for indices in self._ramps.split(alone.items):
            out.append([alone.items[i] for i in indices])
        everything = range(len(alone.items))
        jobs.take(jobs.only(), everything, slot + len(out) - 1, distance)
        return out

    def _fill(self, state: _State, target: int, lookahead: int) -> _Window:
        jobs = state.jobs.copy()
        committed = self.effort.committed * self.limits.capacity
        stop = committed + lookahead * self.limits.capacity
        slots: list[Slot] = []
        work, done = [], 0
        after = None
        while done < stop and jobs:
            if after is None and done >= committed:
                after = len(slots), jobs.copy()
            for items in self._next_slots(jobs, state.slot + len(slots), target):
                slots.append(self._slot(items))
                done += sum(i[0] for i in items)
                work.append(done)
        is_done = not jobs
        if after is None or is_done:
            after = len(slots), jobs
        num, jobs_after = after
        before = self._in_pipeline(state.before + slots[:num])
        return _Window(
            slots=slots,
            num_committed=num,
            after=_State(jobs_after, state.slot + num, before),
            work=np.array(work),
            time=self._times(state.before, slots, is_done),
        )

    def _slot(self, items: list[Item]) -> Slot:
        tokens: dict[int, int] = {}
        for _, n, sample in items:
            tokens[sample.owner] = tokens.get(sample.owner, 0) + n
        padded = sum(map(self.limits.padded, tokens.values()))
        bucket_tokens = self.cost.bucket_tokens(padded)
        return items, bucket_tokens, sum(n * n for _, n, _ in items)

    def _times(
        self, before: list[Slot], slots: list[Slot], is_done: bool
    ) -> np.ndarray:
        """Returns the total time after each slot; see `_Window.time`."""
        in_order = before + slots
        tokens = np.array([s[1] for s in in_order], float)
        squares = np.array([s[2] for s in in_order], float)
        is_real = np.array([bool(s[0]) for s in in_order], float)
        forward, backward = self.cost.times(tokens, squares, is_real)
        cycles = slowest_per_cycle(forward + backward)
        time = cycles[len(before) : len(in_order)].cumsum()
        if is_done:
            time[-1] += cycles[len(in_order) :].sum()
        return time


def _fastest(plans: dict[int, _Window]) -> int:
    """Returns the index of the plan that is the first to finish their common work."""
    common = min(p.work[-1] for p in plans.values())
    return min(plans, key=lambda i: np.interp(common, plans[i].work, plans[i].time))


def _work_targets(
    limits: Limits, cost: CostModel, fill_targets: tuple[float, ...]
) -> tuple[int, ...]:
    """Returns the work to which microbatches are filled, in descending order."""
    if cost.buckets:
        fitting = [b for b in cost.buckets if b <= limits.capacity]
        return tuple(reversed(fitting)) or (limits.capacity,)
    targets = {max(limits.block_tokens, int(f * limits.capacity)) for f in fill_targets}
    return tuple(sorted(targets, reverse=True))


def _microbatch(items: Sequence[Item]) -> Microbatch:
    return tuple(sorted((i[2] for i in items), key=lambda s: (s.owner, s.index)))

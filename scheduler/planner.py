"""Plans microbatches window by window; jobs may join and leave between windows."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.cursor import BatchCursor, BatchSource, Item, WorkModel
from jaxlora.scheduler.fill import fill_slot
from jaxlora.scheduler.job_queue import JobQueue
from jaxlora.scheduler.local_search import LocalSearch
from jaxlora.scheduler.simulate import check_stages, slowest_per_cycle
from jaxlora.scheduler.types import Limits, Microbatch, Pipeline, Sample

# While the best target stays the same, other targets are tried again after this many
# windows.
_RETRY_INTERVAL = 4
# With many jobs, one more or less hardly changes the best target. The same number of
# jobs counts as another window before other targets are tried again.
_MANY_JOBS = 16
_MAX_INTERVAL = 16

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
    """

    committed: int = 24
    lookahead: int = 32
    fill_targets: tuple[float, ...] = _FILL_TARGETS
    trades_per_slot: int = 12

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
        return self._improve(state, plans[best])

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
            self._earliest(state, plan.committed),
            self.limits,
            self.pipeline,
            self.cost,
            before=[list(s[0]) for s in state.before],
            after=[list(s[0]) for s in plan.slots[num : num + num_after]],
        )
        found = search.run(self.effort.trades_per_slot * num)
        slots = [self._slot(items) for items in found]
        jobs = plan.after.jobs
        for index, x in list(jobs.changed()):
            last = search.last_before(x.job, x.batch) if x.items else None
            if last is not None:
                ready = state.slot + last + self.pipeline.distance
                if ready != x.ready:
                    jobs.replace(index, ready=ready)
        after = dataclasses.replace(
            plan.after, before=self._in_pipeline(state.before + slots)
        )
        return dataclasses.replace(plan, slots=slots + plan.slots[num:], after=after)

    def _earliest(self, state: _State, slots: list[Slot]) -> dict[int, int]:
        """Returns the slot, from the first of `slots`, in which each job may run."""
        jobs = {item[2].owner for slot in slots for item in slot[0]}
        return {job: state.jobs[self._index[job]].ready - state.slot for job in jobs}

    def _in_pipeline(self, slots: list[Slot]) -> list[Slot]:
        return slots[-self.pipeline.num_stages :]

    def _fill(self, state: _State, target: int, lookahead: int) -> _Window:
        limits, distance = self.limits, self.pipeline.distance
        jobs = state.jobs.copy()
        committed = self.effort.committed * limits.capacity
        stop = committed + lookahead * limits.capacity
        slots: list[Slot] = []
        work, done = [], 0
        after = None
        while done < stop and jobs:
            if after is None and done >= committed:
                after = len(slots), jobs.copy()
            items = fill_slot(jobs, state.slot + len(slots), target, limits, distance)
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

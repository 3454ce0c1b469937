"""Plans microbatches window by window; jobs may join and leave between windows."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.simulate import check_stages
from jaxlora.scheduler.types import Limits, Microbatch, Pipeline, Sample, in_order
from jaxlora.scheduler.windows.cursor import BatchCursor, BatchSource, WorkModel
from jaxlora.scheduler.windows.job_queue import JobQueue
from jaxlora.scheduler.windows.window import (
    CROWD,
    DEFAULT_EFFORT,
    Effort,
    State,
    Window,
    WindowFiller,
)

# While the best target stays the same, other targets are tried again after this many
# windows.
_RETRY_INTERVAL = 4
# With many jobs, one more or less hardly changes the best target. The same number of
# jobs counts as another window before other targets are tried again.
_MANY_JOBS = 16
_MAX_INTERVAL = 16
# A plan of a single window polishes the fillings with this many targets.
_NUM_POLISHED = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobBatches:
    """The global batches of a job, which are read as planning proceeds.

    Attributes:
        batches: Samples of each global batch, in order.
        num_batches: Number of batches.
        batch_tokens: Mean number of tokens in a batch, which may be an estimate.
        is_started: Whether some samples of the first batch are in earlier microbatches,
            so that `batches` has the rest of it.
        ready: First slot in which the first batch may run.
        urgency_per_batch: How much each batch that is left adds to the job's urgency:
            the most urgent job comes first. None: the slots that a batch takes, so that
            the job that needs the most slots comes first.
        first_urgency: The part of its urgency that it has in any case.
        priority: Jobs of higher priority come first, however urgent others are.
    """

    batches: Iterable[Sequence[Sample]]
    num_batches: int
    batch_tokens: float
    is_started: bool = False
    ready: int = 0
    urgency_per_batch: float | None = None
    first_urgency: float = 0.0
    priority: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hint:
    """Findings of a window that say which targets the next one tries first.

    It saves time. It also decides which targets are tried, so a plan that shall be
    repeated needs the same hints.

    Attributes:
        target: Index of the best fill target; None: there was no window before.
        num_fixed: For how many further windows no other target is tried.
        num_jobs: Number of jobs when all targets were tried.
    """

    target: int | None = None
    num_fixed: int = 0
    num_jobs: int = 0


class Planner:
    """Plans window by window; jobs may join, pause and resume between windows.

    A window is planned with several fill targets. For each one, its slots are filled
    one by one to that amount of work. The plan that finishes the window's work first
    wins, where time is the sum over all cycles of the slowest microbatch in the
    pipeline (`slowest_per_cycle`). Local search then balances the first slots, which
    are committed. The other slots are planned again as part of the next window.

    Attributes:
        hint: What the last window has found.
    """

    def __init__(
        self,
        limits: Limits,
        pipeline: Pipeline,
        cost: CostModel,
        effort: Effort = DEFAULT_EFFORT,
        *,
        first_slot: int = 0,
        before: Sequence[Microbatch] = (),
        hint: Hint | None = None,
    ):
        """Starts without jobs.

        Args:
            limits: Capacity and block size.
            pipeline: Provides the distance between the batches of a job.
            cost: Costs of microbatches, which the planner minimizes.
            effort: How hard to plan.
            first_slot: Number of the first slot to plan.
            before: The microbatches before it that share the pipeline with it.
            hint: What the window before it has found; None: there was none.

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
        self._filler = WindowFiller(limits, pipeline, cost, effort)
        slots = [self._filler.slot([self._work.item(s) for s in m]) for m in before]
        self._state = State(
            jobs=JobQueue(), slot=first_slot, before=slots or [((), 0, 0)]
        )
        self.hint = Hint() if hint is None else hint

    def add(self, job: JobBatches) -> None:
        """Adds a job, which is planned from the next window on.

        Raises:
            ValueError: The job was added before, or its first batch is invalid.
        """
        slots = job.batch_tokens / self.limits.capacity + self.pipeline.distance - 1
        slots = max(1.0, slots)  # two batches of a job never share a slot
        source = BatchSource(job.batches, self._work, self.limits)
        new = BatchCursor.at_start(
            source,
            num_batches=job.num_batches,
            urgency_per_batch=job.urgency_per_batch or slots,
            first_urgency=job.first_urgency,
            priority=job.priority,
            is_started=job.is_started,
            ready=job.ready,
        )
        if source.job is None:
            return  # it has no batches
        if source.job in self._state.jobs.index_of:
            raise ValueError(f"job {source.job} was already added. Add each job once.")
        self._state.jobs.add(new)

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

    @property
    def is_done(self) -> bool:
        """Whether no job has samples left to run."""
        return not self._state.jobs

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
        return [in_order(i[2] for i in s[0]) for s in plan.committed]

    def _known(self, job: int) -> int:
        """Returns the index of a job that was added."""
        index_of = self._state.jobs.index_of
        if job not in index_of:
            raise ValueError(f"job {job} was not added. The jobs are {list(index_of)}.")
        return index_of[job]

    def _plan_window(self, state: State) -> Window:
        """Returns the best of the plans with different targets."""
        filler, jobs = self._filler, state.jobs
        if filler.runs_alone(jobs) is not None:
            return filler.polish(state, filler.fill(state, self._targets[0], 0))
        candidates, hint = self._candidates(len(jobs)), self.hint
        is_fixed = len(candidates) == 1
        lookahead = self.effort.lookahead // (4 if len(jobs) >= CROWD else 1)
        lookahead = filler.context if is_fixed else lookahead
        fill = lambda i: filler.fill(state, self._targets[i], lookahead)
        plans = {i: fill(i) for i in candidates}
        ranked = _by_speed(plans)
        if len(candidates) > 3:  # a coarse grid, refined around its best target
            plans |= {i: fill(i) for i in self._around(ranked[0]) if i not in plans}
            ranked = _by_speed(plans)
        num_fixed = hint.num_fixed - 1
        if not is_fixed:
            interval = _RETRY_INTERVAL if ranked[0] == hint.target else 1
            interval = max(interval, len(jobs) // _MANY_JOBS)
            num_fixed = min(interval, _MAX_INTERVAL) - 1
        is_new = self._is_other_number(len(jobs))
        self.hint = Hint(
            target=ranked[0],
            num_fixed=num_fixed,
            num_jobs=len(jobs) if is_new else hint.num_jobs,
        )
        is_whole = state.slot == 0 and not plans[ranked[0]].after.jobs
        improved = [
            filler.improve(state, plans[i])
            for i in ranked[: _NUM_POLISHED if is_whole else 1]
        ]
        polished = [filler.polish(state, plan) for plan in improved]
        if not is_whole:
            return polished[0]
        # The makespan of a window that is the whole plan is known.
        return min([*polished, improved[0]], key=filler.makespan)

    def _candidates(self, num_jobs: int) -> Sequence[int]:
        """Returns the indices of the targets that a window tries first.

        The best target changes slowly while the number of jobs stays the same. So the
        first window tries every other target. Later ones try the neighbors of the best
        target, and once it is stable, only at intervals.
        """
        best = self.hint.target
        if best is None or self._is_other_number(num_jobs):
            return range(len(self._targets))[::2]
        return [best] if self.hint.num_fixed else self._around(best)

    def _is_other_number(self, num_jobs: int) -> bool:
        """Whether all targets are tried, as there are more or fewer jobs than then."""
        if self.hint.target is None:
            return True
        changed = abs(num_jobs - self.hint.num_jobs)
        return num_jobs < CROWD and changed > num_jobs // _MANY_JOBS

    def _around(self, best: int) -> Sequence[int]:
        return range(len(self._targets))[max(0, best - 1) : best + 2]


def _by_speed(plans: dict[int, Window]) -> list[int]:
    """Returns the indices of plans; the first to finish their common work leads."""
    common = min(p.work[-1] for p in plans.values())
    time = lambda i: float(np.interp(common, plans[i].work, plans[i].time))
    return sorted(plans, key=time)


def _work_targets(
    limits: Limits, cost: CostModel, fill_targets: tuple[float, ...]
) -> tuple[int, ...]:
    """Returns the work to which microbatches are filled, in descending order."""
    if cost.buckets:
        fitting = [b for b in cost.buckets if b <= limits.capacity]
        return tuple(reversed(fitting)) or (limits.capacity,)
    targets = {max(limits.block_tokens, int(f * limits.capacity)) for f in fill_targets}
    return tuple(sorted(targets, reverse=True))

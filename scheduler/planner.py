"""Plans one window of microbatches after another, under several targets of work."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.frontier import Item, Progress, Source, Work, fill_slot
from jaxlora.scheduler.improve import Search
from jaxlora.scheduler.simulate import check_stages, dearest
from jaxlora.scheduler.types import Limits, Microbatch, Pipeline, Sample

# Windows from one try of other targets to the next while the best one stays the same.
RETRIED_EVERY = 4

SHARES = (1.06, 1.03, 1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How hard to plan, in counts instead of time: one input has one plan.

    Attributes:
        committed: Full microbatches' worth of work that one window adds to the plan.
        looked_ahead: How many more it is judged by.
        shares: Work that microbatches may be filled to, in shares of the capacity.
            Squared lengths count as more work, so that one full of tokens can be over
            1. With buckets, they take this place.
        trades_a_slot: Exchanges of samples between neighbours that local search may
            try, for each slot.
    """

    committed: int = 24
    looked_ahead: int = 32
    shares: tuple[float, ...] = SHARES
    trades_a_slot: int = 12

    def __post_init__(self):
        if self.committed < 1 or self.looked_ahead < 0:
            raise ValueError(
                f"committed must be positive and looked_ahead not negative, got "
                f"{self.committed} and {self.looked_ahead}."
            )
        if not self.shares or min(self.shares) <= 0:
            raise ValueError(f"shares must be positive, got {self.shares}.")


DEFAULT = Effort()
# As few microbatches as can be: full of tokens, whatever else they cost. Takes longer
# to run, the more so the fewer jobs there are.
FEWEST = Effort(shares=(1.12,), trades_a_slot=0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobBatches:
    """A job's global batches, read while planning goes on.

    Attributes:
        batches: Its global batches in order, each the samples of one.
        num_batches: How many there are.
        batch_tokens: Mean tokens of a batch; an estimate does.
    """

    batches: Iterable[Sequence[Sample]]
    num_batches: int
    batch_tokens: float


# A filled slot: (items, charged tokens, sum of squared lengths).
Slot = tuple[Sequence[Item], int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    """Between two slots."""

    jobs: list[Progress]
    slot: int
    before: list[Slot]  # the last slots, which still share the pipeline with the next


@dataclasses.dataclass(frozen=True, slots=True)
class _Window:
    """A plan of the next slots."""

    slots: list[Slot]
    num_committed: int
    after: _State
    work: np.ndarray  # done until after each slot
    time: np.ndarray  # taken until after each slot, and at the end until all is done

    @property
    def committed(self) -> list[Slot]:
        return self.slots[: self.num_committed]


class Planner:
    """Plans window by window; jobs may come and go in between.

    A window is filled slot by slot to a target of work; of several targets, that one is
    taken under which the window's work is done first, by the sum over time of the
    dearest of S consecutive microbatches. Local search evens the window's first slots
    out, which are committed; the rest is planned again with what follows it.

    Args:
        limits: Capacity and block size.
        pipeline: Says how far apart batches of a job must be.
        cost: What is to be made small.
        effort: How hard to try.
    """

    def __init__(
        self,
        limits: Limits,
        pipeline: Pipeline,
        cost: CostModel,
        effort: Effort = DEFAULT,
    ):
        check_stages(cost, pipeline)
        self.limits = limits
        self.pipeline = pipeline
        self.cost = cost
        self.effort = effort
        self._work = Work.of(cost)
        self._targets = _targets(limits, cost, effort.shares)
        self._state = _State(jobs=[], slot=0, before=[((), 0, 0)])
        self._best: int | None = None  # number of the last window's target
        self._unchanged = 0  # windows since it was another one
        self._num_jobs = 0

    def add(self, job: JobBatches) -> None:
        """From the next window on, plans a job too.

        Raises:
            ValueError: The job is planned already, or its first batch cannot be.
        """
        slots = job.batch_tokens / self.limits.capacity + self.pipeline.distance - 1
        slots = max(1.0, slots)  # two batches never share one
        source = Source(job.batches, self._work, self.limits)
        new = Progress(source, num_batches=job.num_batches, slots_a_batch=slots)
        if source.job is None:
            return  # it has no batches
        if any(x.source.job == source.job for x in self._state.jobs):
            raise ValueError(f"job {source.job} is planned already: add each job once.")
        self._state.jobs.append(new)

    def pause(self, job: int) -> None:
        """Ends a job's part after the batch that is under way, until it is resumed.

        What is already planned stays: a started batch is always completed.
        """
        self._progress(job).paused = True

    def resume(self, job: int) -> None:
        """Goes on with a paused job where it stopped."""
        self._progress(job).paused = False

    @property
    def num_batches_held(self) -> int:
        """Batches in memory: read, and not yet planned to their end."""
        return sum(x.source.num_held for x in self._state.jobs)

    def next_window(self) -> list[Microbatch]:
        """The next microbatches; none when no job has anything to run.

        Raises:
            ValueError: A batch that was read is empty, or has a sample over the
                capacity.
        """
        if not any(x.runs for x in self._state.jobs):
            return []
        plan = self._window(self._state)
        self._state = plan.after
        for x in self._state.jobs:
            x.source.forget_before(x.number)
        return [_microbatch(s[0]) for s in plan.committed]

    def _progress(self, job: int) -> Progress:
        for x in self._state.jobs:
            if x.source.job == job:
                return x
        known = [x.source.job for x in self._state.jobs]
        raise ValueError(f"job {job} was never added; the jobs are {known}.")

    def _window(self, state: _State) -> _Window:
        """The best of plans with several targets."""
        tried = self._tried(sum(x.runs for x in state.jobs))
        ahead = self.effort.looked_ahead if len(tried) > 1 else 0
        plans = {i: self._fill(state, self._targets[i], ahead) for i in tried}
        best = _soonest(plans)
        if len(tried) > 3:  # a coarse grid
            for i in self._around(best):
                if i not in plans:
                    plans[i] = self._fill(state, self._targets[i], ahead)
            best = _soonest(plans)
        self._unchanged = self._unchanged + 1 if best == self._best else 0
        self._best = best
        return self._improve(state, plans[best])

    def _tried(self, num_jobs: int) -> Sequence[int]:
        """Numbers of the targets that a window tries first.

        The best one changes slowly as long as the jobs are the same: every other one at
        first, then the neighbours of the best, then only now and then.
        """
        if self._best is None or num_jobs != self._num_jobs:
            self._num_jobs = num_jobs
            return range(len(self._targets))[::2]
        if self._unchanged % RETRIED_EVERY:
            return [self._best]
        return self._around(self._best)

    def _around(self, best: int) -> Sequence[int]:
        return range(len(self._targets))[max(0, best - 1) : best + 2]

    def _improve(self, state: _State, plan: _Window) -> _Window:
        """The same with better committed slots, and the next window told of them."""
        if not self.effort.trades_a_slot:
            return plan
        num, near = plan.num_committed, self.pipeline.num_stages - 1
        search = Search(
            [list(s[0]) for s in plan.committed],
            {x.job: x.ready - state.slot for x in state.jobs if x.items},
            self.limits,
            self.pipeline,
            self.cost,
            before=[list(s[0]) for s in state.before],
            after=[list(s[0]) for s in plan.slots[num : num + near]],
        )
        slots = [self._slot(s) for s in search.run(self.effort.trades_a_slot * num)]
        for x in plan.after.jobs:
            last = search.last_before(x.job, x.batch) if x.items else None
            if last is not None:
                x.ready = state.slot + last + self.pipeline.distance
        return dataclasses.replace(
            plan,
            slots=slots + plan.slots[num:],
            after=dataclasses.replace(
                plan.after, before=self._before(state.before + slots)
            ),
        )

    def _before(self, slots: list[Slot]) -> list[Slot]:
        return slots[-self.pipeline.num_stages :]

    def _fill(self, state: _State, target: int, ahead: int) -> _Window:
        limits, distance = self.limits, self.pipeline.distance
        jobs = [x.copy() for x in state.jobs]
        keep = self.effort.committed * limits.capacity
        stop = keep + ahead * limits.capacity
        slots: list[Slot] = []
        work, done = [], 0
        after = None
        while done < stop and any(x.runs for x in jobs):
            if after is None and done >= keep:
                after = len(slots), [x.copy() for x in jobs]
            items = fill_slot(jobs, state.slot + len(slots), target, limits, distance)
            slots.append(self._slot(items))
            done += sum(i[0] for i in items)
            work.append(done)
        if after is None or not any(x.runs for x in jobs):
            after = len(slots), jobs
        num, jobs_after = after
        time = self._time(state.before, slots, ended=not any(x.runs for x in jobs))
        return _Window(
            slots=slots,
            num_committed=num,
            after=_State(
                jobs_after, state.slot + num, self._before(state.before + slots[:num])
            ),
            work=np.array(work),
            time=time,
        )

    def _slot(self, items: list[Item]) -> Slot:
        tokens: dict[int, int] = {}
        for _, n, sample in items:
            tokens[sample.job] = tokens.get(sample.job, 0) + n
        padded = sum(map(self.limits.padded, tokens.values()))
        return items, self.cost.charged(padded), sum(n * n for _, n, _ in items)

    def _time(self, before: list[Slot], slots: list[Slot], ended: bool) -> np.ndarray:
        every = before + slots
        tokens = np.array([s[1] for s in every], float)
        squares = np.array([s[2] for s in every], float)
        real = np.array([bool(s[0]) for s in every], float)
        forward, backward = self.cost.times(tokens, squares, real)
        each = dearest(forward + backward)
        time = each[len(before) : len(every)].cumsum()
        if ended:
            time[-1] += each[len(every) :].sum()
        return time


def _soonest(plans: dict[int, _Window]) -> int:
    """Number of the plan that has done first what all of them do."""
    common = min(p.work[-1] for p in plans.values())
    return min(plans, key=lambda i: np.interp(common, plans[i].work, plans[i].time))


def _targets(
    limits: Limits, cost: CostModel, shares: tuple[float, ...]
) -> tuple[int, ...]:
    if cost.buckets:
        fitting = [b for b in cost.buckets if b <= limits.capacity]
        return tuple(reversed(fitting)) or (limits.capacity,)
    targets = {max(limits.block_tokens, int(s * limits.capacity)) for s in shares}
    return tuple(sorted(targets, reverse=True))


def _microbatch(items: Sequence[Item]) -> Microbatch:
    return tuple(sorted((i[2] for i in items), key=lambda s: (s.job, s.index)))

"""The ticks of a run, planned while its jobs start and leave, as one object.

It knows no device: the trainer feeds its executor from it, and `jaxlora plan` foretells
a run with it.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping

from jaxlora.run.saved_stream import SavedStream
from jaxlora.scheduler import Sample, Schedule
from jaxlora.scheduler.lanes import Tick, ticks_of
from jaxlora.scheduler.plan_ahead import PlanAhead
from jaxlora.scheduler.stream import (
    Lengths,
    Position,
    Rules,
    StreamState,
    advance,
    next_stretch,
)


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class StreamTick:
    """A tick that was taken, or is about to be.

    Attributes:
        tick: Its microbatches.
        dropped: Slots whose samples do not run, because their job has left or because a
            checkpoint has their step already. Their rows become padding, so no other
            rows move.
    """

    tick: Tick
    dropped: set[int] = dataclasses.field(default_factory=set)

    @property
    def samples(self) -> Iterator[Sample]:
        """The samples that run."""
        return (s for m in self.tick for s in m if s.owner not in self.dropped)


class StreamPlan:
    """The ticks that follow, while jobs start and leave.

    Attributes:
        recent: The ticks that were taken since `forget_figures`.
        num_stretches: Stretches planned since then.
        num_ahead: Stretches of them that were planned in the background.
        waited_seconds: Time that `take` has waited for plans since then.
    """

    def __init__(self, rules: Rules, lengths: Lengths):
        """Starts without jobs.

        Args:
            rules: What all ticks have in common.
            lengths: Tokens of the samples of a batch of a job.
        """
        self._rules, self._lengths = rules, lengths
        self._ahead = PlanAhead(lambda state: next_stretch(state, lengths, rules))
        self._now = StreamState()  # before `_since`
        self._since: list[Tick] = []  # ticks of the stretch that were taken
        self._planned: deque[Tick] = deque()  # ticks of the stretch that were not
        self._after = StreamState()  # after them
        self._fixed: deque[StreamTick] = deque()  # to run once more, before `_planned`
        self._taken: deque[StreamTick] = deque()  # with samples of unfinished batches
        self._steps: dict[int, int] = {}  # optimizer steps of the job in each slot
        self._is_stopped = False
        self.forget_figures()

    def __enter__(self) -> "StreamPlan":
        return self

    def __exit__(self, *_) -> None:
        self._ahead.close()

    def forget_figures(self) -> None:
        """Empties the figures."""
        self.recent: list[Tick] = []
        self.num_stretches = self.num_ahead = 0
        self.waited_seconds = 0.0

    # ---- jobs ----------------------------------------------------------------------

    def start(self, position: Position) -> None:
        """Adds a job to the ticks that are not taken yet."""
        state = self._replan()
        ready = dataclasses.replace(position, ready=state.tick)
        self._now = self._after = state.with_job(ready)
        self._steps[position.owner] = position.batch

    def drop(self, slot: int) -> None:
        """Takes out the job in a slot; what is left of it does not run."""
        for taken in (*self._taken, *self._fixed):
            taken.dropped.add(slot)
        self._steps.pop(slot, None)
        self._forget_finished()
        in_plan = any(s.owner == slot for t in self._planned for m in t for s in m)
        if in_plan or any(p.owner == slot for p in self._after.positions):
            self._now = self._after = self._replan().without(slot)

    def note_step(self, slot: int) -> None:
        """Notes that the job in a slot has done an optimizer step."""
        self._steps[slot] += 1
        self._forget_finished()

    def stop(self) -> None:
        """Lets no further tick be taken."""
        self._is_stopped = True

    def _replan(self) -> StreamState:
        """Gives up the ticks that are planned and not taken; returns the state then."""
        state = advance(self._now, self._since, self._lengths, self._rules)
        self._since, self._planned = [], deque()
        self._now = self._after = state
        return state

    # ---- ticks ---------------------------------------------------------------------

    def take(self) -> StreamTick | None:
        """Returns the next tick; None if no job has samples left, or it is stopped."""
        if self._is_stopped:
            return None
        taken = self._take()
        if taken is not None:
            self.recent.append(taken.tick)
        return taken

    def skip(self) -> None:
        """Passes over the tick that would be taken now if it were not stopped.

        It runs when the run is resumed. So a job that joins or leaves meanwhile changes
        the same ticks as in a run that is not stopped.
        """
        if self._is_stopped:
            self._take()

    def _take(self) -> StreamTick | None:
        if self._fixed:
            taken = self._fixed.popleft()
        else:
            if not self._planned and not self._plan():
                return None
            tick = self._planned.popleft()
            self._since.append(tick)
            taken = StreamTick(tick=tick)
        self._taken.append(taken)
        return taken

    def _plan(self) -> bool:
        """Plans the next stretch; returns whether it has ticks."""
        if not self._after.positions:
            return False
        planned = self._ahead.take(self._after)
        self._now, self._since = self._after, []
        self._planned.extend(planned.stretch.ticks)
        self._after = planned.stretch.after
        if self._after.positions:
            self._ahead.prepare(self._after)
        self.num_stretches += 1
        self.num_ahead += planned.ahead
        self.waited_seconds += planned.waited_seconds
        return True

    def _forget_finished(self) -> None:
        while self._taken and self._is_finished(self._taken[0]):
            self._taken.popleft()

    def _is_finished(self, taken: StreamTick) -> bool:
        return all(s.batch < self._steps.get(s.owner, 0) for s in taken.samples)

    # ---- checkpoints ---------------------------------------------------------------

    def saved(self, jobs: str) -> SavedStream:
        """Returns what a run needs to go on with the same ticks.

        Args:
            jobs: Describes the jobs in the slots.
        """
        return SavedStream.of(
            rules=self._described(jobs),
            repeated=[(t.tick, t.dropped) for t in (*self._taken, *self._fixed)],
            state=advance(self._now, self._since, self._lengths, self._rules),
            planned=tuple(self._planned),
            hints=self._after.hints,
        )

    def restore(
        self,
        saved: SavedStream,
        steps: Mapping[int, int],
        numbers: Mapping[int, int],
        jobs: str,
    ) -> bool:
        """Goes on with saved ticks; returns whether they are of these jobs and rules.

        Samples of batches that are not complete run again, in the same microbatches.

        Args:
            saved: The ticks.
            steps: Optimizer steps of the job in each slot that is in use.
            numbers: Number of the job in each of these slots.
            jobs: Describes these jobs, as for `saved`.

        Raises:
            RuntimeError: The ticks break a rule.
            LookupError: They have samples that there are not.
            ValueError: They have batches that there are not.
        """
        if saved.rules != self._described(jobs):
            return False
        state, planned = saved.state, saved.planned_ticks
        after = advance(state, planned, self._lengths, self._rules)
        for tick, dropped in saved.repeated_ticks:
            taken = StreamTick(tick=tick, dropped=dropped)
            if unknown := {s.owner for s in taken.samples} - steps.keys():
                raise RuntimeError(f"slots {sorted(unknown)} have ticks and no job.")
            taken.dropped |= {
                s.owner for s in taken.samples if s.batch < steps[s.owner]
            }
            for s in taken.samples:
                if s.num_tokens != self._lengths(numbers[s.owner], s.batch)[s.index]:
                    raise RuntimeError(f"slot {s.owner} has samples of other lengths.")
            self._fixed.append(taken)
        self._steps = dict(steps)
        self._now, self._planned = state, deque(planned)
        self._after = dataclasses.replace(after, hints=tuple(saved.hints[1]))
        return True

    def _described(self, jobs: str) -> str:
        rules = self._rules
        return f"{rules.limits} {rules.lanes} {rules.packer} {rules.num_batches} {jobs}"


class FixedTicks:
    """The ticks of a schedule that is made beforehand."""

    def __init__(self, schedule: Schedule, num_lanes: int = 1):
        """Starts before the first tick.

        Args:
            schedule: The schedule.
            num_lanes: Number of microbatches in a tick.
        """
        ticks = ticks_of(schedule.microbatches, num_lanes)
        self._all = [StreamTick(tick=tick) for tick in ticks]
        self._left = deque(self._all)

    def take(self) -> StreamTick | None:
        """Returns the next tick; None after the last one."""
        return self._left.popleft() if self._left else None

    def drop(self, slot: int) -> None:
        """Takes out the job in a slot; its rows become padding."""
        for tick in self._all:
            tick.dropped.add(slot)

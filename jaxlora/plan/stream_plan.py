"""The ticks of a run, planned while its jobs start and leave, as one object.

It knows no device: the trainer feeds its executor from it, and `jaxlora plan` foretells
a run with it.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from jaxlora.run.saved_run import SavedStream
from jaxlora.scheduler import Sample, padded_tokens
from jaxlora.scheduler.lanes import Tick
from jaxlora.scheduler.stream.state import (
    Lengths,
    Position,
    Rules,
    StreamState,
    advance,
)
from jaxlora.scheduler.stream.stream import PlanAhead, next_stretch


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class StreamTick:
    """A tick that was taken, or is about to be.

    Attributes:
        tick: Its microbatches.
        rows: Rows of each of its microbatches, padding included: its compiled shape.
        dropped: Slots whose samples do not run, because their job has left or because a
            checkpoint has their step already. Their rows become padding, so no other
            rows move.
        parts: The ticks into which it is divided for the devices; None: it was not
            looked at yet.
        is_held: Whether it waits until the run is resumed.
    """

    tick: Tick
    rows: int
    dropped: set[int] = dataclasses.field(default_factory=set)
    parts: tuple[Tick, ...] | None = None
    is_held: bool = False

    @property
    def samples(self) -> Iterator[Sample]:
        """The samples that run."""
        return (s for m in self.tick for s in m if s.owner not in self.dropped)


@runtime_checkable
class TickSource(Protocol):
    """Ticks that an executor runs."""

    def take(self) -> StreamTick | None:
        """Returns the next tick; None if there is none."""


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
        self._ahead = PlanAhead(lambda s: next_stretch(s, lengths, self._rules))
        self._now = StreamState()  # before `_since`
        self._since: list[Tick] = []  # ticks of the stretch that were taken
        self._planned: deque[Tick] = deque()  # ticks of the stretch that were not
        self._after = StreamState()  # after them
        self._fixed: deque[StreamTick] = deque()  # to run once more, before `_planned`
        self._taken: deque[StreamTick] = deque()  # with samples of unfinished batches
        self._steps: dict[int, int] = {}  # optimizer steps of the job in each slot
        self._ends: dict[int, int] = {}  # steps to which it was added
        self._num_held: int | None = None  # ticks to take and hold; None: not stopped
        self._leaving: dict[int, int] = {}  # the tick from which each slot is free
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
        """Adds a job to the ticks that are not taken yet.

        A job that has done all batches of its last position may be added again.
        """
        self._steps[position.owner] = position.batch
        self._ends[position.owner] = position.num_batches
        if position.batch < position.num_batches:
            state = self._replan()
            ready = dataclasses.replace(position, ready=state.tick)
            self._now = self._after = state.with_job(ready, self._rules.pace)

    def set_priorities(self, priorities: Mapping[int, int]) -> None:
        """Changes the priorities of the jobs in slots, in ticks that are not taken yet.

        Args:
            priorities: The priority of the job in each slot.
        """
        now = self._now.positions
        if all(priorities.get(p.owner, p.priority) == p.priority for p in now):
            return
        state = self._replan()
        positions = tuple(
            dataclasses.replace(p, priority=priorities.get(p.owner, p.priority))
            for p in state.positions
        )
        self._now = self._after = dataclasses.replace(state, positions=positions)

    def is_done(self, slot: int) -> bool:
        """Whether the job in a slot has done all batches of its position."""
        return self._steps[slot] >= self._ends[slot]

    def drop(self, slot: int) -> None:
        """Takes out the job in a slot; what is left of it does not run."""
        done = self._steps.get(slot, 0)
        has_rows = any(
            s.owner == slot and s.batch >= done for t in self._taken for s in t.samples
        )
        for taken in (*self._taken, *self._fixed):
            taken.dropped.add(slot)
        self._steps.pop(slot, None)
        self._ends.pop(slot, None)
        self._forget_finished()
        pipeline = self._rules.lanes.pipeline
        if has_rows and pipeline.num_stages > 1:
            self._leaving[slot] = self._next_tick + self._width
        in_plan = any(s.owner == slot for t in self._planned for m in t for s in m)
        if in_plan or any(p.owner == slot for p in self._after.positions):
            self._now = self._after = self._replan().without(slot)

    def note_step(self, slot: int) -> None:
        """Notes that the job in a slot has done an optimizer step."""
        self._steps[slot] += 1
        self._forget_finished()

    def stop(self) -> None:
        """Lets no further tick run; those that are taken now are held.

        They are taken until all ticks in flight are reported. So a job that joins or
        leaves meanwhile changes the same ticks as in a run that is not stopped.
        """
        if self._num_held is None:
            self._num_held = 2 * self._width

    def is_free(self, slot: int) -> bool:
        """Whether no tick in flight has rows of the last job in a slot.

        It is counted in ticks, so that it does not depend on how a run was resumed.
        """
        return self._leaving.get(slot, 0) <= self._next_tick

    def forget_leaving(self) -> None:
        """Notes that nothing is in flight."""
        self._leaving.clear()

    @property
    def _next_tick(self) -> int:
        """Number of the next tick that is taken."""
        return self._now.tick + len(self._since)

    @property
    def _width(self) -> int:
        """Ticks in flight on the first stage."""
        pipeline = self._rules.lanes.pipeline
        return pipeline.in_flight or pipeline.num_stages

    def _replan(self) -> StreamState:
        """Gives up the ticks that are planned and not taken; returns the state then."""
        state = advance(self._now, self._since, self._lengths, self._rules)
        self._since, self._planned = [], deque()
        self._now = self._after = state
        return state

    # ---- ticks ---------------------------------------------------------------------

    def take(self) -> StreamTick | None:
        """Returns the next tick; None if no job has samples left and all are reported.

        While steps are outstanding, after which other jobs may start, it is a no-op.
        """
        if self._num_held == 0:
            return None
        taken = self._take()
        if taken is None:
            return None
        if self._num_held is not None:
            self._num_held -= 1
            taken.is_held = True
        else:
            self.recent.append(taken.tick)
        self._taken.append(taken)
        return taken

    def _take(self) -> StreamTick | None:
        if self._fixed:
            return self._fixed.popleft()
        if self._planned or self._plan():
            tick = self._planned.popleft()
        else:
            self._forget_finished()
            is_leaving = any(not self.is_free(slot) for slot in self._leaving)
            if not self._taken and not is_leaving:
                return None
            tick = ((),) * self._rules.lanes.num_lanes
            self._after = dataclasses.replace(self._after, tick=self._after.tick + 1)
        rows = self._rules.rows(self._next_tick, tick)
        self._since.append(tick)
        return StreamTick(tick=tick, rows=rows)

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

    def saved(self, jobs: str, at_border: Sequence[int]) -> SavedStream:
        """Returns what a run needs to go on with the same ticks.

        Args:
            jobs: Describes the jobs in the slots.
            at_border: Slots whose jobs are between two of their batches.
        """
        return SavedStream(
            rules=self._described(jobs),
            repeated=tuple(
                (part, taken.rows, frozenset(taken.dropped))
                for taken in (*self._taken, *self._fixed)
                for part in taken.parts or (taken.tick,)
            ),
            state=advance(self._now, self._since, self._lengths, self._rules),
            planned=tuple(self._planned),
            shapes_from=self._rules.shapes_from,
            leaving=dict(self._leaving),
            at_border=tuple(at_border),
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
        self._rules = dataclasses.replace(self._rules, shapes_from=saved.shapes_from)
        after = advance(saved.state, saved.planned, self._lengths, self._rules)
        for tick, rows, dropped in saved.repeated:
            self._check_shape(tick, rows)
            taken = StreamTick(
                tick=tick, rows=rows, dropped=set(dropped), parts=(tick,)
            )
            if unknown := {s.owner for s in taken.samples} - steps.keys():
                raise RuntimeError(f"slots {sorted(unknown)} have ticks and no job.")
            taken.dropped |= {
                s.owner for s in taken.samples if s.batch < steps[s.owner]
            }
            for s in taken.samples:
                lengths = self._lengths(numbers[s.owner], s.batch)
                if s.index < 0 or s.num_tokens != lengths[s.index]:
                    raise RuntimeError(f"slot {s.owner} has samples of other lengths.")
            self._fixed.append(taken)
        self._steps, self._leaving = dict(steps), dict(saved.leaving)
        self._ends = dict(steps)
        for s in (s for taken in self._fixed for s in taken.samples):
            self._ends[s.owner] = max(self._ends[s.owner], s.batch + 1)
        self._ends |= {p.owner: p.num_batches for p in saved.state.positions}
        self._now, self._planned = saved.state, deque(saved.planned)
        self._after = after
        return True

    def _described(self, jobs: str) -> str:
        rules = self._rules
        shapes = f"{rules.limits} {rules.cost.buckets} {rules.lanes}"
        return f"{shapes} {rules.packer} {rules.num_batches} {rules.pace} {jobs}"

    def _check_shape(self, tick: Tick, rows: int) -> None:
        limits = self._rules.limits
        shapes = self._rules.cost.buckets or (limits.capacity,)
        longest = max(padded_tokens(microbatch, limits) for microbatch in tick)
        if rows not in shapes or longest > rows:
            raise RuntimeError(
                f"a tick of {longest} tokens has the shape {rows}; the run has {shapes}"
            )

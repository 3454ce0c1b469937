"""Trains the jobs of a run as one stream of microbatches.

The microbatches of all running jobs are planned together and follow each other without
a break. A job starts, pauses and ends between two of its own global batches, while the
others go on: the stream is then planned anew from the next microbatch on.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from jaxlora.adapters.parked_slot import ReadSlot
from jaxlora.plan.stream_plan import StreamPlan
from jaxlora.run.events import WindowEvent
from jaxlora.run.saved_stream import SavedStream
from jaxlora.scheduler import Schedule
from jaxlora.train.execute.executor import Executor, Outcomes
from jaxlora.train.execute.feed import TickWork
from jaxlora.train.execute.job_lifecycle import JobLifecycle
from jaxlora.train.job_state import JobState
from jaxlora.train.live_run import LiveRun


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Border:
    """A point between two microbatches at which a run may change.

    Attributes:
        ends_round: Whether a round has ended here.
        ends_window: Whether a window has, too.
        snapshot: The states of the slots here, if `Rounds.snapshot` has promised them.
    """

    ends_round: bool
    ends_window: bool
    snapshot: ReadSlot | None


class _Window:
    """Counts the work of a window, for the event that reports it.

    Attributes:
        begin, end: Training time at its begin, and when its last results came. The next
            window begins there, as the work that follows may be done on the device
            before the window is reported.
        num_rounds: Rounds that have ended.
        by_replica: Its work, by the number of the replica.
    """

    def __init__(self, begin: float):
        self.begin = self.end = begin
        self.num_rounds = 0
        self.by_replica: dict[int, TickWork] = {}

    def add(self, outcomes: Outcomes, now: float) -> None:
        """Counts an item of the executor."""
        self.end = now
        for number, work in outcomes.work.items():
            self.by_replica[number] = self.by_replica.get(number, TickWork()) + work

    @property
    def work(self) -> TickWork:
        """The work of all replicas."""
        return sum(self.by_replica.values(), TickWork())


class Rounds:
    """Trains the jobs of a run until all have ended or are paused.

    A round ends when every job that ran at its beginning has taken an optimizer step or
    has left. A checkpoint ends one, too.
    """

    def __init__(self, run: LiveRun, executor: Executor):
        """Makes the object; `restore` and `start` come first.

        Args:
            run: The run; jobs may join it, and requests may come, at each border.
            executor: Has the slots, and runs the microbatches.
        """
        self._run, self._executor = run, executor
        self._plan, self._config = run.plan, run.plan.config
        self._ticks = StreamPlan(
            run.plan.rules, lambda job, step: run.live.jobs[job].prepared.lengths(step)
        )
        self._life = JobLifecycle(run, executor, self._ticks)
        self._due: set[str] = set()  # jobs without a step in this round
        self._has_stepped = False  # in this round
        self._stepped: list[JobState] = []  # jobs that are between two batches
        self._window = _Window(self._now())

    def __enter__(self) -> "Rounds":
        self._ticks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._ticks.__exit__(*error)

    @property
    def round(self) -> int:
        """Rounds done."""
        return self._run.round

    # ---- checkpoints ---------------------------------------------------------------

    def saved(self) -> SavedStream:
        """Returns the microbatches that follow, for a checkpoint at this border."""
        here = [job.slot for job in self._stepped if job.has_slot]
        return self._ticks.saved(self._life.describe(), here)

    def restore(self, saved: SavedStream | None) -> None:
        """Takes up the jobs that have a slot, where a checkpoint has left them.

        Args:
            saved: The microbatches that followed the checkpoint; None: there are none.

        Raises:
            RuntimeError, LookupError, ValueError: They break a rule.
        """
        self._stepped = self._life.restore(saved)

    def snapshot(self) -> ReadSlot | None:
        """Copies the states of all slots, each after the steps reported so far.

        Returns:
            The states; None if a later border has them.
        """
        found = self._executor.snapshot()
        self._life.may_start = found is not None
        return found

    def end_round(self) -> None:
        """Ends a round that has events, so that a checkpoint can be named by it."""
        if self._life.has_events:
            self._end_round()

    # ---- running -------------------------------------------------------------------

    def start(self) -> bool:
        """Ends, pauses and starts jobs; False if none is left to run.

        Jobs that start for the first time are evaluated.
        """
        if not self._life.active:
            self._ticks.forget_leaving()
        self._life.change(self._stepped)
        if not self._life.active:
            self.end_round()  # that of the events above, as no step follows
        return self._life.has_work()

    def run(self) -> Iterator[Border]:
        """Trains until no job has samples left, or until `stop`.

        Jobs end at the borders that it yields. Jobs that are added there, and requests
        that are made there, take effect when the iterator continues.
        """
        if not self._life.active:
            return  # all jobs ended at their first evaluation
        self._due = {job.name for job in self._life.active}
        self._window = _Window(self._now())
        for outcomes in self._executor.run(self._ticks, self._life.by_slot):
            self._window.add(outcomes, self._now())
            stepped = self._stepped = self._handle(outcomes)
            num_rounds = self.round
            if not self._due and self._has_stepped:
                self._end_round()
            if outcomes.snapshot is not None:
                self._life.may_start = True
            yield Border(
                ends_round=self.round > num_rounds,
                ends_window=self.round > num_rounds and not self._window.num_rounds,
                snapshot=outcomes.snapshot,
            )
            if not self._life.is_settled() or any(not j.has_slot for j in stepped):
                self._life.change([job for job in stepped if job.has_slot])
            if self.round > num_rounds:
                self._due = {job.name for job in self._life.active}
        self._ticks.forget_leaving()
        if not self._life.may_start:  # no tick has followed that could be copied after
            self._life.may_start = True
            snapshot = self._executor.snapshot()
            yield Border(ends_round=False, ends_window=False, snapshot=snapshot)
        self.end_round()
        if self._window.work.num_microbatches:
            self._end_window()

    def stop(self) -> None:
        """Lets no further microbatch start; those in flight are finished."""
        self._ticks.stop()

    def _handle(self, outcomes: Outcomes) -> list[JobState]:
        """Handles results of optimizer steps; returns the jobs that have stepped."""
        stepped = [self._life.by_slot[slot] for slot in outcomes.steps]
        stepped.sort(key=self._life.number)  # evaluations are packed in this order
        self._has_stepped |= bool(stepped)
        for job in stepped:
            self._life.note(job, outcomes.steps[job.slot])
        running = [job for job in stepped if job.progress.status == "running"]
        self._life.evaluate([j for j in running if self._life.side_work.wants_eval(j)])
        self._life.end_jobs(stepped)
        self._due.difference_update(job.name for job in stepped)
        self._due.intersection_update(job.name for job in self._life.active)
        return stepped

    def _end_round(self) -> None:
        self._run.round += 1
        self._has_stepped = self._life.has_events = False
        self._due = {job.name for job in self._life.active}
        self._window.num_rounds += 1
        if (
            self.round % self._config.window_steps == 0
            and self._window.work.num_microbatches
        ):
            self._end_window()

    def _end_window(self) -> None:
        """Sends the figures of the last rounds."""
        window, ticks = self._window, self._ticks
        seconds, work = window.end - window.begin, window.work
        recent = Schedule(
            microbatches=tuple(m for tick in ticks.recent for m in tick),
            limits=self._config.limits,
        )
        event = WindowEvent(
            round=self.round,
            num_rounds=window.num_rounds,
            num_tokens=work.num_tokens,
            seconds=round(seconds, 4),
            tokens_per_second=round(work.num_tokens / seconds, 1),
            num_microbatches=work.num_microbatches,
            fill=_fill(work),
            planned_ahead=ticks.num_ahead == ticks.num_stretches,
            planning_seconds=round(ticks.waited_seconds, 4),
            pipeline=self._plan.pipeline_figures(recent),
            predicted_seconds=self._plan.seconds(
                recent, is_part=True, num_changes=self._life.num_changes
            ),
            replicas=self._by_replica(),
        )
        ticks.forget_figures()
        self._life.num_changes = 0
        self._window = _Window(window.end)
        self._run.send(event)

    def _by_replica(self) -> tuple[dict[str, Any], ...]:
        """Returns the work of each replica; nothing if replicas are alike."""
        works = self._window.by_replica
        return tuple(
            {
                "replica": number + 1,
                "microbatch_tokens": replica.capacity,
                "num_microbatches": work.num_microbatches,
                "num_tokens": work.num_tokens,
                "fill": _fill(work),
            }
            for number, replica in enumerate(self._plan.lanes.replicas)
            for work in [works.get(number, TickWork())]
        )

    def _now(self) -> float:
        """Returns the seconds of the clock that were spent on training."""
        return time.perf_counter() - self._life.side_work.seconds


def _fill(work: TickWork) -> float:
    """Returns the share of the rows that hold tokens."""
    return round(work.num_tokens / max(1, work.num_rows), 4)

"""Trains the jobs of a run as one stream of microbatches.

The microbatches of all running jobs are planned together and follow each other without
a break. A job starts, pauses and ends between two of its own global batches, while the
others go on: the stream is then planned anew from the next microbatch on.
"""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from jaxlora.adapters.slots import ReadSlot
from jaxlora.common.counted import counted
from jaxlora.run.events import (
    EvalEvent,
    Event,
    JobEndEvent,
    JobEvent,
    JobPauseEvent,
    JobResumeEvent,
    JobStartEvent,
    SampleEvent,
    StepEvent,
    WindowEvent,
)
from jaxlora.run.saved_stream import SavedStream
from jaxlora.scheduler import Schedule
from jaxlora.scheduler.stream import Position
from jaxlora.train.execute.executor import Executor, Outcomes, StepOutcome
from jaxlora.train.execute.samples import MakeSamples
from jaxlora.train.job_state import JobState
from jaxlora.train.plan.job_slots import JobPosition, assign_slots
from jaxlora.train.plan.run_plan import RunPlan
from jaxlora.train.plan.stream_plan import StreamPlan
from jaxlora.train.requests import Requests

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Border:
    """A point between two microbatches at which a run may change.

    Attributes:
        ends_round: Whether a round has ended here.
        ends_window: Whether a window has, too.
        snapshot: The states of the slots here, if `Stream.snapshot` has promised them.
    """

    ends_round: bool
    ends_window: bool
    snapshot: ReadSlot | None


class _Window:
    """The work of some rounds, for the event that reports it."""

    def __init__(self):
        self.num_microbatches = self.num_tokens = self.num_rounds = 0
        self.untimed_seconds = 0.0  # not spent on training
        self._began = time.perf_counter()

    def add(self, outcomes: Outcomes) -> None:
        """Counts an item of the executor."""
        self.num_microbatches += outcomes.num_microbatches
        self.num_tokens += outcomes.num_tokens

    @property
    def seconds(self) -> float:
        """Time spent on training."""
        return time.perf_counter() - self._began - self.untimed_seconds


class Stream:
    """Trains the jobs of a run until all have ended or are paused.

    Attributes:
        jobs: Jobs of the run; more may be added at a border.
        round: Rounds done. A round ends when every job that ran at its beginning has
            taken an optimizer step or has left. A checkpoint ends one, too.
    """

    def __init__(
        self,
        plan: RunPlan,
        jobs: Sequence[JobState],
        executor: Executor,
        *,
        first_round: int,
        requests: Requests,
        export: Callable[[JobState], None],
        send: Callable[[Event], None],
        make_samples: MakeSamples | None = None,
    ):
        """Makes the object; `restore` and `start` come first.

        Args:
            plan: The plan of the run.
            jobs: Jobs of the run; more may be added at a border.
            executor: Runs the microbatches.
            first_round: Rounds done before.
            requests: Requests to stop and to pause jobs; more may come at any time.
            export: Writes a job's adapter.
            send: Sends an event to the callbacks.
            make_samples: Generates texts with the adapters in slots, for evaluations.
        """
        self._plan, self._config = plan, plan.config
        self.jobs, self._executor = jobs, executor
        self._requests, self._export = requests, export
        self._send, self._make_samples = send, make_samples
        self._ticks = StreamPlan(
            plan.rules, lambda job, step: jobs[job].prepared.lengths(step)
        )
        self.round = first_round
        self._by_slot: dict[int, JobState] = {}
        self._numbers: dict[str, int] = {}  # of jobs, by name
        self._due: set[str] = set()  # jobs without a step in this round
        self._has_stepped = self._has_events = False  # in this round
        self._window = _Window()
        self._awaits_snapshot = False
        self._settled: tuple[int, ...] | None = None  # see `_is_settled`

    def __enter__(self) -> "Stream":
        self._ticks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._ticks.__exit__(*error)

    # ---- checkpoints ---------------------------------------------------------------

    def saved(self) -> SavedStream:
        """Returns the microbatches that follow, for a checkpoint at this border."""
        return self._ticks.saved(self._describe_jobs())

    def restore(self, saved: SavedStream | None) -> None:
        """Takes up the jobs that have a slot, where a checkpoint has left them.

        Args:
            saved: The microbatches that followed the checkpoint; None: there are none.

        Raises:
            RuntimeError: They break a rule.
        """
        self._by_slot = {job.slot: job for job in self.jobs if job.has_slot}
        steps = {slot: job.progress.step for slot, job in self._by_slot.items()}
        jobs = self._describe_jobs()
        if saved is not None and self._ticks.restore(saved, steps, jobs):
            return
        for job in self._by_slot.values():
            self._ticks.start(self._position(job))

    def _describe_jobs(self) -> str:
        return ", ".join(
            f"{slot}: {job.name} of {job.num_steps}"
            for slot, job in sorted(self._by_slot.items())
        )

    def snapshot(self) -> ReadSlot | None:
        """Copies the states of all slots, each after the steps reported so far.

        Returns:
            The states; None if a later border has them.
        """
        found = self._executor.snapshot()
        self._awaits_snapshot = found is None
        return found

    def end_round(self) -> None:
        """Ends a round that has events, so that a checkpoint can be named by it."""
        if self._has_events:
            self._end_round()

    # ---- starting jobs -------------------------------------------------------------

    def _running(self) -> list[JobState]:
        return [job for job in self.jobs if job.progress.status == "running"]

    def _positions(self) -> list[JobPosition]:
        """Returns the positions of running jobs, and of those that may start."""
        return [
            JobPosition(
                job=number,
                priority=job.settings.priority,
                slot=job.progress.slot,
                step=job.progress.step,
                num_steps=job.num_steps,
                batch_tokens=job.batch_tokens,
            )
            for number, job in enumerate(self.jobs)
            if job.has_slot or not (job.progress.is_over or self._is_held(job))
        ]

    def _is_held(self, job: JobState) -> bool:
        """Whether a job was asked to pause."""
        return self._requests.pause_reason(job.name) is not None

    def start(self) -> bool:
        """Ends, pauses and starts jobs; False if none is left to run.

        Jobs that start for the first time are evaluated.
        """
        self._change(self.jobs)
        if not self._by_slot:
            self.end_round()  # that of the events above, as no step follows
        return bool(self._positions())

    def _is_settled(self) -> bool:
        """Whether nothing has come up since the last `_change`."""
        return self._settled == (len(self.jobs), self._requests.version)

    def _change(self, at_border: Collection[JobState]) -> int:
        """Ends, pauses and starts jobs; returns how many have left.

        Args:
            at_border: The jobs with a slot that are between two global batches.
        """
        seen = len(self.jobs), self._requests.version
        here = [job for job in self.jobs if job in at_border or not job.has_slot]
        num_left = self._end_jobs(here)  # stopped since they were last looked at
        here = [job for job in here if job.has_slot]
        num_left += self._pause_by_request(here)
        positions = assign_slots(
            self._positions(),
            self._plan.num_slots,
            preempts=self._config.preempt,
            lanes=self._plan.lanes,
        )
        num_left += self._pause_for_priority(positions, here)
        num_left += self._start_jobs(positions)
        # A slot may have been left or may not be free yet, and a job that is to pause
        # may be in the middle of a batch: look again.
        is_settled = not num_left and all(
            self.jobs[p.job].progress.slot == p.slot for p in positions
        )
        is_settled &= not any(map(self._is_held, self._by_slot.values()))
        self._settled = seen if is_settled else None
        return num_left

    def _pause_by_request(self, at_border: Collection[JobState]) -> int:
        """Pauses jobs that were asked to pause; returns how many."""
        count = 0
        for job in at_border:
            if (reason := self._requests.pause_reason(job.name)) is not None:
                self._pause(job, reason)
                count += 1
        return count

    def _pause_for_priority(
        self, positions: Sequence[JobPosition], at_border: Collection[JobState]
    ) -> int:
        """Pauses jobs whose slots others are to have; returns how many."""
        jobs = [self.jobs[p.job] for p in positions if p.slot is None]
        paused = [job for job in jobs if job.has_slot and job in at_border]
        for job in paused:
            self._pause(job, "a job of higher priority has its slot")
        return len(paused)

    def _start_jobs(self, positions: Sequence[JobPosition]) -> int:
        """Starts jobs that get a slot, and evaluates them if due; returns how many end.

        A job that was paused continues, and is not evaluated again.
        """
        new = []
        for position in positions:
            job, slot = self.jobs[position.job], position.slot
            if slot is None or job.has_slot or self._awaits_snapshot:
                continue
            if slot in self._by_slot or not self._executor.is_free(slot):
                continue  # soon
            if job.parked is None:
                new.append(job)
            self._start(job, slot)
        self._evaluate([job for job in new if job.wants_eval()])
        return self._end_jobs(new)

    def _pause(self, job: JobState, reason: str) -> None:
        """Parks the whole state of a running job, and frees its slot."""
        job.parked = self._executor.copy(job.slot)
        self._leave(job)
        job.update(status="paused", reason=reason)
        logger.info("%s: paused. %s", job.name, reason)
        self._send_of(job, JobPauseEvent, reason=reason)

    def _leave(self, job: JobState) -> None:
        """Frees the slot of a job."""
        slot = job.slot
        self._ticks.drop(slot)
        self._executor.release(slot)
        del self._by_slot[slot]
        job.update(slot=None)

    def _start(self, job: JobState, slot: int) -> None:
        """Loads a job into a free slot: its first adapter, or its parked state."""
        parked, job.parked = job.parked, None
        job.update(status="running", reason="", slot=slot)
        self._by_slot[slot] = job
        self._ticks.start(self._position(job))
        if parked is None:
            self._executor.load(slot, job.start, job.settings.optimizer)
            logger.info("%s starts in slot %d", job.name, slot)
            self._send_of(job, JobStartEvent, slot=slot)
            return
        self._executor.restore(slot, parked, job.like)
        logger.info("%s continues in slot %d", job.name, slot)
        self._send_of(job, JobResumeEvent, slot=slot)

    def _number(self, job: JobState) -> int:
        """Returns the number of a job in the run."""
        for number in range(len(self._numbers), len(self.jobs)):
            self._numbers[self.jobs[number].name] = number
        return self._numbers[job.name]

    def _position(self, job: JobState) -> Position:
        return Position(
            job=self._number(job),
            owner=job.slot,
            batch=job.progress.step,
            num_batches=job.num_steps,
            batch_tokens=job.batch_tokens,
        )

    def _send_of(self, job: JobState, kind: type[JobEvent], **values) -> None:
        """Sends an event of a job at the step that it has reached."""
        self._has_events = True
        event = kind(
            round=self.round + 1,
            job=job.name,
            progress=job.progress,
            num_steps=job.num_steps,
            **values,
        )
        self._send(event)

    # ---- running -------------------------------------------------------------------

    def run(self) -> Iterator[Border]:
        """Trains until no job has samples left, or until `stop`.

        Jobs end at the borders that it yields. Jobs that are added there, and requests
        that are made there, take effect when the iterator continues.
        """
        if not self._by_slot:
            return  # all jobs ended at their first evaluation
        self._due = {job.name for job in self._by_slot.values()}
        self._window = _Window()
        for outcomes in self._executor.run(self._ticks, self._by_slot):
            self._window.add(outcomes)
            self._ticks.skip()
            stepped = self._handle(outcomes)
            num_rounds = self.round
            if not self._due and self._has_stepped:
                self._end_round()
            if outcomes.snapshot is not None:
                self._awaits_snapshot = False
            yield Border(
                ends_round=self.round > num_rounds,
                ends_window=self.round > num_rounds and not self._window.num_rounds,
                snapshot=outcomes.snapshot,
            )
            if not self._is_settled() or any(not job.has_slot for job in stepped):
                self._change([job for job in stepped if job.has_slot])
        if self._awaits_snapshot:
            self._awaits_snapshot = False
            snapshot = self._executor.snapshot()
            yield Border(ends_round=False, ends_window=False, snapshot=snapshot)
        self.end_round()
        if self._window.num_microbatches:
            self._end_window()

    def stop(self) -> None:
        """Lets no further microbatch start; those in flight are finished."""
        self._ticks.stop()

    def _handle(self, outcomes: Outcomes) -> list[JobState]:
        """Handles results of optimizer steps; returns the jobs that have stepped."""
        stepped = [self._by_slot[slot] for slot in outcomes.steps]
        stepped.sort(key=self._number)  # evaluations are packed in this order
        for job in stepped:
            self._note(job, outcomes.steps[job.slot])
        self._evaluate(
            [r for r in stepped if r.progress.status == "running" and r.wants_eval()]
        )
        self._end_jobs(stepped)
        self._due.difference_update(job.name for job in stepped)
        self._due.intersection_update(job.name for job in self._by_slot.values())
        return stepped

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        """Excludes the time of the block from the time spent on training."""
        self._executor.wait()  # the pending microbatch counts as training
        began = time.perf_counter()
        yield
        self._window.untimed_seconds += time.perf_counter() - began

    def _note(self, job: JobState, outcome: StepOutcome) -> None:
        self._has_stepped = True
        if not outcome.is_finite:
            job.update(
                status="failed",
                reason=f"loss {outcome.loss:g} with gradient norm "
                f"{outcome.grad_norm:g} in step {job.progress.step + 1} is not finite; "
                "lower learning_rate or set max_grad_norm",
            )
            return
        self._ticks.note_step(job.slot)
        job.note_step(outcome.loss, outcome.num_tokens)
        self._send_of(
            job,
            StepEvent,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            learning_rate=outcome.learning_rate,
            num_tokens=outcome.num_tokens,
            num_target_tokens=outcome.num_target_tokens,
        )

    def _end_round(self) -> None:
        self.round += 1
        self._has_stepped = self._has_events = False
        self._due = {job.name for job in self._by_slot.values()}
        self._window.num_rounds += 1
        if (
            self.round % self._config.window_steps == 0
            and self._window.num_microbatches
        ):
            self._end_window()

    def _end_window(self) -> None:
        """Sends the figures of the last rounds."""
        window, ticks = self._window, self._ticks
        recent = Schedule(
            microbatches=tuple(m for tick in ticks.recent for m in tick),
            limits=self._config.limits,
        )
        rows = window.num_microbatches * self._config.limits.capacity
        event = WindowEvent(
            round=self.round,
            num_rounds=window.num_rounds,
            num_tokens=window.num_tokens,
            seconds=round(window.seconds, 4),
            tokens_per_second=round(window.num_tokens / window.seconds, 1),
            num_microbatches=window.num_microbatches,
            fill=round(window.num_tokens / rows, 4) if rows else 0.0,
            planned_ahead=ticks.num_ahead == ticks.num_stretches,
            planning_seconds=round(ticks.waited_seconds, 4),
            pipeline=self._plan.pipeline_figures(recent),
        )
        ticks.forget_figures()
        self._window = _Window()
        self._send(event)

    def _evaluate(self, jobs: Sequence[JobState]) -> None:
        if not jobs:
            return
        with self._untimed():
            losses = self._executor.evaluate({job.slot: job for job in jobs})
        sound = [job for job in jobs if math.isfinite(losses[job.slot])]
        for job in jobs:
            loss = losses[job.slot]
            if not math.isfinite(loss):
                job.update(status="failed", reason="the evaluation loss is not finite")
                continue
            is_best = job.note_eval(loss)
            if is_best and job.settings.keep_best:
                with self._untimed():
                    self._export(job)
            self._send_of(job, EvalEvent, eval_loss=loss, is_best=is_best)
        self._send_samples(sound)

    def _send_samples(self, jobs: Sequence[JobState]) -> None:
        """Generates texts with the adapters of jobs that were evaluated."""
        if self._make_samples is None or not jobs:
            return
        with self._untimed():
            samples = self._make_samples({job.name: job.slot for job in jobs})
        for job in jobs:
            for values in samples[job.name]:
                self._send_of(job, SampleEvent, **values)

    # ---- ending jobs ---------------------------------------------------------------

    def _end_jobs(self, jobs: Sequence[JobState]) -> int:
        """Evaluates and exports the jobs that end here, and frees their slots.

        Args:
            jobs: Jobs that are between two batches, or wait.

        Returns:
            The number of jobs that ended.
        """
        was_over = {job for job in jobs if job.progress.is_over and not job.has_slot}
        for job in jobs:
            if not job.progress.is_over:
                self._decide(job)
        ending = [r for r in jobs if r.progress.is_over and r not in was_over]
        # A request to stop may come at any step, even when no evaluation is due.
        self._evaluate(
            [r for r in ending if r.progress.status == "stopped" and r.lacks_eval()]
        )
        for job in ending:
            self._end(job)
        return len(ending)

    def _end(self, job: JobState) -> None:
        """Exports the adapter of a job that is over, and releases its slot."""
        has_weights = job.has_slot or job.parked is not None
        if (
            has_weights
            and job.progress.status != "failed"
            and not job.settings.keep_best
        ):
            with self._untimed():
                self._export(job)
        job.parked = None
        if job.has_slot:
            self._leave(job)
        ended = job.progress
        logger.info("%s: %s (%s)", job.name, ended.status, ended.reason)
        self._send_of(job, JobEndEvent, status=ended.status, reason=ended.reason)

    def _decide(self, job: JobState) -> None:
        """Marks a job as over if it ends here; it is between two batches, or waits."""
        if (step := job.progress.step) > (wanted := job.num_steps):
            reason = f"{counted(step, 'step')} done, and the number wanted is {wanted}"
            job.update(status="finished", reason=reason)
        elif step == wanted:
            job.update(status="finished", reason="all steps are done")
        elif job.has_stalled():
            patience = job.settings.early_stopping
            reason = f"no better evaluation for {patience} evaluations"
            job.update(status="stopped early", reason=reason)
        elif (reason := self._requests.stop_reason(job.name)) is not None:
            job.update(status="stopped", reason=reason)

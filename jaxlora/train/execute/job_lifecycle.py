"""Starts, evaluates, pauses and ends the jobs of a stream, between their batches."""

import logging
from collections.abc import Collection, Sequence

from jaxlora.common.counted import counted
from jaxlora.plan.job.job_slots import JobPosition, assign_slots
from jaxlora.plan.stream_plan import StreamPlan
from jaxlora.run.events import (
    JobEndEvent,
    JobEvent,
    JobPauseEvent,
    JobResumeEvent,
    JobStartEvent,
    StepEvent,
)
from jaxlora.run.saved_stream import SavedStream
from jaxlora.scheduler.streams.state import Position
from jaxlora.train.cloning import end_orphans, start_copies
from jaxlora.train.execute.executor import Executor, StepOutcome
from jaxlora.train.execute.side_work import SideWork
from jaxlora.train.job_state import JobState
from jaxlora.train.live_run import LiveRun

logger = logging.getLogger(__name__)


class JobLifecycle:
    """The jobs of a run and their slots.

    Attributes:
        jobs: Jobs of the run; more may be added between two microbatches.
        by_slot: The running jobs, by slot.
        has_events: Whether there were events since it was last set to False.
        may_start: Whether jobs may start now.
        num_changes: How many jobs have started in slots, or left them.
        side_work: Evaluates and exports jobs.
    """

    def __init__(self, run: LiveRun, executor: Executor, ticks: StreamPlan):
        """Makes the object; see `Rounds`, whose microbatches `ticks` has."""
        self.jobs, self.by_slot = run.live.jobs, {}
        self.has_events, self.may_start = False, True
        self.num_changes = 0
        self.side_work = SideWork(run, executor, self._send_of)
        self._run, self._executor, self._ticks = run, executor, ticks
        self._numbers: dict[str, int] = {}  # of jobs, by name
        self._settled: tuple[int, ...] | None = None  # see `is_settled`

    @property
    def round(self) -> int:
        """Rounds done. Events are of the next one."""
        return self._run.round

    # ---- starting and pausing ------------------------------------------------------

    def restore(self, saved: SavedStream | None) -> list[JobState]:
        """Takes up the jobs that have a slot, where a checkpoint has left them.

        Args:
            saved: The microbatches that followed the checkpoint; None: there are none.

        Returns:
            The jobs with a slot that are between two of their batches.

        Raises:
            RuntimeError, LookupError, ValueError: They break a rule.
        """
        self.by_slot = {job.slot: job for job in self.jobs if job.has_slot}
        for slot, job in self.by_slot.items():
            self.side_work.refer_in_step(job, slot)
        steps = {slot: job.progress.step for slot, job in self.by_slot.items()}
        numbers = {slot: self.number(job) for slot, job in self.by_slot.items()}
        found = saved and self._ticks.restore(saved, steps, numbers, self.describe())
        if saved is not None and found:
            return [self.by_slot[s] for s in saved.at_border if s in self.by_slot]
        for job in self.by_slot.values():
            self._ticks.start(self._position(job))
        return list(self.by_slot.values())

    def describe(self) -> str:
        """Describes the jobs in the slots, for the microbatches that are saved."""
        return ", ".join(
            f"{slot}: {self.number(job)} {job.name} of {self._num_allowed(job)}"
            for slot, job in sorted(self.by_slot.items())
        )

    def number(self, job: JobState) -> int:
        """Returns the number of a job in the run."""
        for number in range(len(self._numbers), len(self.jobs)):
            self._numbers[self.jobs[number].name] = number
        return self._numbers[job.name]

    def _position(self, job: JobState) -> Position:
        return Position(
            job=self.number(job),
            owner=job.slot,
            batch=job.progress.step,
            num_batches=self._num_allowed(job),
            batch_tokens=job.batch_tokens,
        )

    def _num_allowed(self, job: JobState) -> int:
        """Returns the number of steps to which a job is planned.

        Where it may have to wait for others of a sweep, none of its microbatches is in
        flight, so it can wait in its slot.
        """
        return min(self._run.control.num_allowed(job), job.num_steps)

    @property
    def active(self) -> list[JobState]:
        """The running jobs that have microbatches left before they may have to wait."""
        return [j for j in self.by_slot.values() if not self._ticks.is_done(j.slot)]

    def _positions(self) -> list[JobPosition]:
        """Returns the positions of running jobs, and of those that may start."""
        return [
            JobPosition(
                job=self.number(job),
                priority=job.settings.priority,
                slot=job.progress.slot,
                step=job.progress.step,
                num_steps=job.num_steps,
                batch_tokens=job.batch_tokens,
            )
            for job in self._candidates()
        ]

    def _candidates(self) -> list[JobState]:
        """Returns the running jobs, and those that may start."""
        return [job for job in self.jobs if job.has_slot or self._may_start(job)]

    def _may_start(self, job: JobState) -> bool:
        is_ready = not (job.progress.is_over or job.awaits_parent)
        return is_ready and self._why_held(job) is None

    def _why_held(self, job: JobState) -> str | None:
        """Returns why a job is not to run: by request, or as a sweep compares it."""
        asked = self._run.requests.pause_reason(job.name)
        return asked or self._run.control.waiting_reason(job)

    def has_work(self) -> bool:
        """Whether a job runs or may start."""
        return bool(self.active or any(not j.has_slot for j in self._candidates()))

    def is_settled(self) -> bool:
        """Whether nothing has come up since the last `change`."""
        return self._settled == self._seen()

    def _seen(self) -> tuple[int, ...]:
        """Returns what changes when a job may have to start, to pause or to end."""
        return len(self.jobs), self._run.requests.version, self._run.control.version

    def change(self, at_border: Collection[JobState]) -> None:
        """Ends, pauses and starts jobs.

        Args:
            at_border: The jobs with a slot that are between two global batches.
        """
        seen = self._seen()
        idle = [job for job in self.by_slot.values() if self._ticks.is_done(job.slot)]
        at_border = [*at_border, *(job for job in idle if job not in at_border)]
        num_left = self._end_stopped(at_border)
        here = [job for job in at_border if job.has_slot]
        num_left += self._pause_held(here) + self._make_room(here)
        positions = assign_slots(
            self._positions(),
            self._run.plan.num_slots,
            preempts=self._run.plan.config.preempt,
        )
        num_left += self._pause_for_priority(positions, here)
        num_left += self._start_jobs(positions)
        # A slot may have been left or may not be free yet, and a job that is to pause
        # may be in the middle of a batch: look again.
        is_settled = not num_left and all(
            self.jobs[p.job].progress.slot == p.slot for p in positions
        )
        is_settled &= all(self._why_held(job) is None for job in self.active)
        self._settled = seen if is_settled else None

    def _end_stopped(self, at_border: Collection[JobState]) -> int:
        """Ends jobs that were stopped since they were last looked at."""
        count = 0
        while True:
            # No rung waits any more for a job that has ended or was paused.
            self._run.control.review(self.jobs)
            here = [job for job in self.jobs if job in at_border or not job.has_slot]
            if not (ended := self.end_jobs(here)):
                return count
            count += ended

    def _pause_held(self, at_border: Collection[JobState]) -> int:
        """Pauses jobs that are not to run now; returns how many.

        A job whose microbatches have ended where it waits for others of a sweep keeps
        its slot, as copying its state takes longer than a microbatch.
        """
        count = 0
        for job in at_border:
            is_idle = self._ticks.is_done(job.slot)
            asked = self._run.requests.pause_reason(job.name)
            reason = self._why_held(job)
            if asked is not None or (reason is not None and not is_idle):
                self._pause(job, reason or "")
                count += 1
            elif reason is None and is_idle:
                self._ticks.start(self._position(job))
        return count

    def _make_room(self, at_border: Collection[JobState]) -> int:
        """Pauses jobs in slots that others need, if they wait; returns how many."""
        idle = [j for j in at_border if j.has_slot and self._ticks.is_done(j.slot)]
        if not idle:
            return 0
        num_waiting = sum(not job.has_slot for job in self._candidates())
        num_missing = num_waiting + len(self.by_slot) - self._run.plan.num_slots
        leaving = idle[: max(0, num_missing)]
        for job in leaving:
            self._pause(job, self._why_held(job) or "")
        return len(leaving)

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
            if slot is None or job.has_slot or not self.may_start:
                continue
            if slot in self.by_slot or not self._ticks.is_free(slot):
                continue  # soon
            if job.parked is None:
                new.append(job)
            self._start(job, slot)
        self.evaluate([job for job in new if self.side_work.wants_eval(job)])
        return self.end_jobs(new)

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
        del self.by_slot[slot]
        self.num_changes += 1
        job.leave_slot()

    def _start(self, job: JobState, slot: int) -> None:
        """Loads a job into a free slot: its first adapter, or its parked state."""
        if job.lacks_references:
            self.side_work.refer(job, slot)
        parked, job.parked = job.parked, None
        if parked is None:
            self._executor.load(slot, job.start, job.settings.optimizer)
            verb, event = "starts", JobStartEvent
        else:
            self._executor.restore(slot, parked, job.like)
            verb, event = "continues", JobResumeEvent
        self.side_work.refer_in_step(job, slot)
        job.update(status="running", reason="", slot=slot)
        self.by_slot[slot] = job
        self.num_changes += 1
        self._ticks.start(self._position(job))
        logger.info("%s %s in slot %d", job.name, verb, slot)
        self._send_of(job, event, slot=slot)

    def _send_of(self, job: JobState, kind: type[JobEvent], **values) -> None:
        """Sends an event of a job at the step that it has reached."""
        self.has_events = True
        event = kind(
            round=self.round + 1,
            job=job.name,
            progress=job.progress,
            num_steps=job.num_steps,
            **values,
        )
        self._run.send(event)

    # ---- steps, evaluations and ends -----------------------------------------------

    def note(self, job: JobState, outcome: StepOutcome) -> None:
        """Takes the outcome of an optimizer step of a running job."""
        if not outcome.is_finite:
            job.update(
                status="failed",
                reason=f"loss {outcome.loss:g} with gradient norm "
                f"{outcome.grad_norm:g} in step {job.progress.step + 1} is not finite; "
                "lower learning_rate or set max_grad_norm",
            )
            return
        self._ticks.note_step(job.slot)
        job.note_step(outcome.loss, outcome.num_tokens, outcome.num_target_tokens)
        self._send_of(
            job,
            StepEvent,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            learning_rate=outcome.learning_rate,
            num_tokens=outcome.num_tokens,
            num_target_tokens=outcome.num_target_tokens,
            metrics=outcome.metrics,
        )

    def evaluate(self, jobs: Sequence[JobState]) -> None:
        """Evaluates running jobs; see `SideWork.evaluate`."""
        if self.side_work.evaluate(jobs, self.jobs):
            self._settled = None  # jobs may have to wait, or to end

    def end_jobs(self, jobs: Sequence[JobState]) -> int:
        """Evaluates and exports the jobs that end here, and frees their slots.

        Args:
            jobs: Jobs that are between two batches, or wait.

        Returns:
            The number of jobs that ended.
        """
        if start_copies(self.jobs, jobs, self._executor.copy):
            self._settled = None
        was_over = {job for job in jobs if job.progress.is_over and not job.has_slot}
        for job in jobs:
            if not job.progress.is_over:
                self._decide(job)
        ending = [r for r in jobs if r.progress.is_over and r not in was_over]
        ending += end_orphans(self.jobs)
        # A request to stop may come at any step, even when no evaluation is due.
        self.evaluate(
            [r for r in ending if r.progress.status == "stopped" and r.lacks_eval()]
        )
        for job in ending:
            self._end(job)
        return len(ending)

    def _end(self, job: JobState) -> None:
        """Exports the adapter of a job that is over, and releases its slot."""
        keep_best, exported = job.settings.keep_best, job.progress.best_step
        if not keep_best:
            is_wanted = job.has_begun and job.progress.status != "failed"
            exported = job.progress.step if is_wanted else None
        if exported is not None and not keep_best:
            self.side_work.export(job)
        job.parked = None
        if job.has_slot:
            self._leave(job)
        ended = job.progress
        logger.info("%s: %s (%s)", job.name, ended.status, ended.reason)
        if exported == 0:
            why = "no later evaluation is better" if ended.step else "it took no step"
            logger.warning(
                "%s: the exported adapter is that of step 0, before any training: %s",
                job.name,
                why,
            )
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
        elif (stop := self._run.control.stop_of(job)) is not None:
            rule, reason = stop
            job.update(
                status="stopped early", reason=f"{rule}: {reason}", stopped_by=rule
            )
        elif (reason := self._run.requests.stop_reason(job.name)) is not None:
            job.update(status="stopped", reason=reason)

"""Starts, evaluates, pauses and ends the jobs of a stream, between their batches."""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

import numpy as np

from jaxlora.common.counted import counted
from jaxlora.plan.job.job_slots import assign_slots
from jaxlora.plan.stream_plan import StreamPlan
from jaxlora.run.events import (
    EvalEvent,
    JobEndEvent,
    JobPauseEvent,
    JobResumeEvent,
    JobStartEvent,
    SampleEvent,
    StepEvent,
    losses_by_set,
)
from jaxlora.run.saved_run import SavedStream
from jaxlora.scheduler.admission import Candidate
from jaxlora.scheduler.stream.state import Position
from jaxlora.train.execute.executor import Executor, StepOutcome
from jaxlora.train.job_state import JobState
from jaxlora.train.run import Run

logger = logging.getLogger(__name__)


class JobLifecycle:
    """The jobs of a run and their slots.

    Attributes:
        jobs: Jobs of the run; more may be added between two microbatches.
        by_slot: The running jobs, by slot.
        may_start: Whether jobs may start now.
        num_changes: How many jobs have started in slots, or left them.
    """

    def __init__(self, run: Run, executor: Executor, ticks: StreamPlan):
        """Makes the object; see `Loop`, whose microbatches `ticks` has."""
        self.jobs, self.by_slot = run.jobs, {}
        self.may_start, self.num_changes = True, 0
        self._run, self._executor, self._ticks = run, executor, ticks
        self._settled: tuple[int, ...] | None = None  # see `is_settled`
        self._has_left = False  # whether a job has ended or paused in this `change`
        self._seconds_aside = 0.0  # that were not spent on training
        self._ahead = run.ahead
        self._references: dict[Hashable, dict[str, np.ndarray]] = {}
        sweep = run.plan.config.sweep
        self._is_maximized = sweep is not None and sweep.metric.is_maximized

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
            self._refer_in_step(job, slot)
        steps = {slot: job.progress.step for slot, job in self.by_slot.items()}
        numbers = {slot: self.number(job) for slot, job in self.by_slot.items()}
        found = saved and self._ticks.restore(saved, steps, numbers, self.describe())
        if saved is not None and found:
            return [self.by_slot[s] for s in saved.at_border if s in self.by_slot]
        for job in self.by_slot.values():
            self._plan(job)
        return list(self.by_slot.values())

    def describe(self) -> str:
        """Describes the jobs in the slots, for the microbatches that are saved."""
        return ", ".join(
            f"{slot}: {self.number(job)} {job.name} of {self._num_allowed(job)}, "
            f"priority {job.settings.priority}"
            for slot, job in sorted(self.by_slot.items())
        )

    def number(self, job: JobState) -> int:
        """Returns the number of a job in the run."""
        return self.jobs.index(job)

    def _plan(self, job: JobState) -> None:
        """Adds a job with a slot to the microbatches that are not taken yet."""
        self._ticks.start(
            Position(
                job=self.number(job),
                owner=job.slot,
                batch=job.progress.step,
                num_batches=self._num_allowed(job),
                batch_tokens=job.batch_tokens,
                priority=job.settings.priority,
            )
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

    def _candidates(self) -> list[Candidate]:
        """Returns the running jobs, and those that may start."""
        return [
            Candidate(job=number, priority=job.settings.priority)
            for number, job in enumerate(self.jobs)
            if job.has_slot
            or not (
                job.progress.is_over or job.awaits or self._why_held(job) is not None
            )
        ]

    def _why_held(self, job: JobState) -> str | None:
        """Returns why a job is not to run: by request, or as a sweep compares it."""
        asked = self._run.live.pause_reason(job.name)
        return asked or self._run.control.waiting_reason(job)

    def has_work(self) -> bool:
        """Whether a job runs or may start."""
        return bool(self.active) or len(self._candidates()) > len(self.by_slot)

    def is_settled(self) -> bool:
        """Whether nothing has come up since the last `change`."""
        return self._settled == self._seen()

    def _seen(self) -> tuple[int, ...]:
        """Returns what changes when a job may have to start, to pause or to end."""
        return len(self.jobs), self._run.live.version, self._run.control.version

    def change(self, at_border: Collection[JobState]) -> None:
        """Ends, pauses and starts jobs.

        Args:
            at_border: The jobs with a slot that are between two global batches.
        """
        seen, self._has_left = self._seen(), False
        idle = [job for job in self.by_slot.values() if self._ticks.is_done(job.slot)]
        at_border = [*at_border, *(job for job in idle if job not in at_border)]
        has_ended = True
        while has_ended:
            # No rung waits any more for a job that has ended or was paused.
            self._run.control.review(self.jobs)
            here = [job for job in self.jobs if job in at_border or not job.has_slot]
            has_ended = self.end_jobs(here)
        here = [job for job in at_border if job.has_slot]
        self._pause_held(here)
        self._make_room(here)
        candidates = self._candidates()
        slots = assign_slots(
            candidates,
            {self.number(job): slot for slot, job in self.by_slot.items()},
            self._run.plan.num_slots,
            preempts=self._run.plan.config.preempt,
        )
        losing = [self.jobs[c.job] for c in candidates if c.job not in slots]
        for job in losing:
            if job.has_slot and job in here:
                self._pause(job, "a job of higher priority has its slot")
        self._start_jobs(slots)
        self._let_leave(losing)
        # A slot may have been left or may not be free yet, and a job that is to pause
        # may be in the middle of a batch: look again.
        is_settled = not self._has_left and all(
            self.jobs[c.job].progress.slot == slots.get(c.job) for c in candidates
        )
        is_settled &= all(self._why_held(job) is None for job in self.active)
        self._settled = seen if is_settled else None

    def _pause_held(self, at_border: Collection[JobState]) -> None:
        """Pauses jobs that are not to run now.

        A job whose microbatches have ended where it waits for others of a sweep keeps
        its slot, as copying its state takes longer than a microbatch.
        """
        for job in at_border:
            is_idle = self._ticks.is_done(job.slot)
            asked = self._run.live.pause_reason(job.name)
            reason = self._why_held(job)
            if asked is not None or (reason is not None and not is_idle):
                self._pause(job, reason or "")
            elif reason is None and is_idle:
                self._plan(job)

    def _make_room(self, at_border: Collection[JobState]) -> None:
        """Pauses jobs in slots that others need, if they wait."""
        idle = [j for j in at_border if j.has_slot and self._ticks.is_done(j.slot)]
        if not idle:
            return
        num_missing = len(self._candidates()) - self._run.plan.num_slots
        for job in idle[: max(0, num_missing)]:
            self._pause(job, self._why_held(job) or "")

    def _let_leave(self, losing: Collection[JobState]) -> None:
        """Lets jobs that are to leave their slots finish their batches before others.

        Others of higher priority could take all microbatches for long.

        Args:
            losing: The jobs whose slots others get.
        """
        live, control = self._run.live, self._run.control
        leaving = {
            slot
            for slot, job in self.by_slot.items()
            if job in losing
            or self._why_held(job) is not None
            or control.stop_of(job) is not None
            or live.stop_reason(job.name) is not None
        }
        own = {slot: job.settings.priority for slot, job in self.by_slot.items()}
        most = max(own.values(), default=0)
        first = {slot: most + 1 for slot in leaving if own[slot] < most}
        self._ticks.set_priorities(own | first)

    def _start_jobs(self, slots: Mapping[int, int]) -> None:
        """Starts jobs that get a slot, by number, and evaluates them if due.

        A job that was paused continues, and is not evaluated again.
        """
        starting = {
            self.jobs[number]: slot
            for number, slot in sorted(slots.items())
            if self.may_start
            and not self.jobs[number].has_slot
            and slot not in self.by_slot  # which may be free soon
            and self._ticks.is_free(slot)
        }
        new = [job for job in starting if job.parked is None]
        queue = [*new, *(job for job in self._waiting() if job not in starting)]
        for job, slot in starting.items():
            with self._run.watch.on("starting jobs"):
                self._ahead.begin(queue)
                if job in new:
                    queue.remove(job)
                self._start(job, slot)
        self._ahead.begin(queue)
        self.evaluate_due(new)
        self.end_jobs(new)

    def _waiting(self) -> list[JobState]:
        """Returns the jobs that wait for a slot, in the order in which they get one."""
        found = sorted(self._candidates(), key=lambda one: (-one.priority, one.job))
        waiting = [self.jobs[one.job] for one in found]
        return [job for job in waiting if not job.has_begun]

    def _pause(self, job: JobState, reason: str) -> None:
        """Parks the whole state of a running job, and frees its slot."""
        self._has_left = True
        job.parked = self._executor.copy(job.slot)
        self._leave(job)
        job.update(status="paused", reason=reason)
        logger.info("%s: paused. %s", job.name, reason)
        self._run.send_of(job, JobPauseEvent, reason=reason)

    def _leave(self, job: JobState) -> None:
        """Frees the slot of a job."""
        slot = job.slot
        self._ticks.drop(slot)
        self._executor.release(slot)
        del self.by_slot[slot]
        self.num_changes += 1
        job.update(slot=None)

    def _start(self, job: JobState, slot: int) -> None:
        """Loads a job into a free slot: its first adapter, or its parked state."""
        if job.lacks_references:
            self._refer(job, slot)
        parked, job.parked = job.parked, None
        if parked is None:
            self._executor.load(slot, self._ahead.take(job), job.settings.optimizer)
            verb, event = "starts", JobStartEvent
        else:
            self._executor.restore(slot, parked, job.like)
            verb, event = "continues", JobResumeEvent
        self._refer_in_step(job, slot)
        job.update(status="running", reason="", slot=slot)
        self.by_slot[slot] = job
        self.num_changes += 1
        self._plan(job)
        logger.info("%s %s in slot %d", job.name, verb, slot)
        self._run.send_of(job, event, slot=slot)

    # ---- steps, evaluations and ends -----------------------------------------------

    def note(self, job: JobState, outcome: StepOutcome) -> None:
        """Takes the outcome of an optimizer step of a running job."""
        if not outcome.is_finite:
            job.fail_of_step(outcome.loss, outcome.grad_norm)
            return
        self._ticks.note_step(job.slot)
        job.note_step(outcome.loss, outcome.num_tokens, outcome.num_target_tokens)
        values = dataclasses.asdict(outcome)
        del values["is_finite"]
        self._run.send_of(job, StepEvent, **values)

    def evaluate_due(self, jobs: Sequence[JobState]) -> None:
        """Evaluates those of the running jobs that are due after their steps so far."""
        wants = self._run.control.wants_eval
        self.evaluate([job for job in jobs if job.wants_eval() or wants(job)])

    def evaluate(self, jobs: Sequence[JobState]) -> None:
        """Evaluates running jobs, and generates texts with their adapters."""
        if not jobs:
            return
        # The evaluation is queued while the pending microbatch still trains.
        results = self._executor.begin_evaluation({job.slot: job for job in jobs})
        with self._timed("evaluation"):
            values = results()
        sound = [job for job in jobs if math.isfinite(values[job.slot]["loss"])]
        metrics: dict[str, float] = {}  # of a sweep that compares answers
        if self._run.meter is not None and sound:
            with self._timed("answers"):
                metrics = self._run.meter.measure(sound, self._run.slots.tables)
        for job in jobs:
            if job not in sound:
                job.update(status="failed", reason="the evaluation loss is not finite")
                continue
            of_objective, metric = values[job.slot], metrics.get(job.name)
            loss = of_objective.pop("loss")
            is_best = job.note_eval(
                loss,
                metric,
                is_maximized=self._is_maximized,
                by_set=losses_by_set(of_objective),
            )
            if is_best and job.settings.keep_best:
                self.export(job)
            self._run.send_of(
                job,
                EvalEvent,
                eval_loss=loss,
                is_best=is_best,
                metric=metric,
                metrics=of_objective,
            )
        if self._run.control.note(self.jobs, sound):
            self._settled = None  # jobs may have to wait, or to end
        self._send_samples(sound)

    def _send_samples(self, jobs: Sequence[JobState]) -> None:
        """Generates texts with the adapters of jobs that were evaluated."""
        sampler, slots = self._run.sampler, self._run.slots
        if sampler is None or not jobs:
            return
        with self._timed("samples"):
            named = {job.name: job.slot for job in jobs}
            samples = sampler.generate(named, slots.tables)
        for job in jobs:
            for values in samples[job.name]:
                self._run.send_of(job, SampleEvent, **values)

    def export(self, job: JobState) -> None:
        """Exports the adapter of a job, which is read and written beside training."""
        with self._run.watch.on("exports"):
            self._run.export(job)

    def end_jobs(self, jobs: Sequence[JobState]) -> bool:
        """Evaluates and exports the jobs that end here, and frees their slots.

        Args:
            jobs: Jobs that are between two batches, or wait.

        Returns:
            Whether any has ended.
        """
        if self._run.live.start_copies(jobs, self._executor.copy):
            self._settled = None
        was_over = {job for job in jobs if job.progress.is_over and not job.has_slot}
        for job in jobs:
            if not job.progress.is_over:
                self._decide(job)
        ending = [r for r in jobs if r.progress.is_over and r not in was_over]
        ending += self._run.live.fail_late_copies()
        # A request to stop may come at any step, even when no evaluation is due.
        self.evaluate(
            [r for r in ending if r.progress.status == "stopped" and r.lacks_eval()]
        )
        for job in ending:
            with self._run.watch.on("ending jobs"):
                self._end(job)
        self._has_left |= bool(ending)
        return bool(ending)

    def _end(self, job: JobState) -> None:
        """Exports the adapter of a job that is over, and releases its slot."""
        keep_best, exported = job.settings.keep_best, job.progress.best_step
        if not keep_best:
            is_wanted = job.has_begun and job.progress.status != "failed"
            exported = job.progress.step if is_wanted else None
        if exported is not None and not keep_best:
            self.export(job)
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
        self._run.send_of(job, JobEndEvent, status=ended.status, reason=ended.reason)

    def _decide(self, job: JobState) -> None:
        """Marks a job as over if it ends here; it is between two batches, or waits."""
        job.end_if_due()
        if job.progress.is_over:
            return
        if (stop := self._run.control.stop_of(job)) is not None:
            rule, reason = stop
            job.update(
                status="stopped early", reason=f"{rule}: {reason}", stopped_by=rule
            )
        elif (reason := self._run.live.stop_reason(job.name)) is not None:
            job.update(status="stopped", reason=reason)

    # ---- references and time -------------------------------------------------------

    def _refer(self, job: JobState, slot: int) -> None:
        """Computes and keeps the log-probabilities of a job's samples by the reference.

        The slot is free. Jobs of the same objective, data and reference, as of a sweep,
        have the same ones.
        """
        reference = job.prepared.reference
        source = job.settings.objective, *sorted(job.reference_source().items())
        with self._timed("references"):
            if source not in self._references:
                self._references[source] = {
                    which: self._executor.log_likelihoods(slot, batch, reference)
                    for which, batch in job.plain_batches(slot).items()
                }
            job.references = self._references[source]
            self._run.keep_references(job)
        count = counted(sum(map(len, job.references.values())), "sample")
        logger.info(
            "%s: the log-probabilities of %s by %s were computed once, and are kept",
            job.name,
            count,
            job.prepared.describe_reference(),
        )

    def _refer_in_step(self, job: JobState, slot: int) -> None:
        """Makes an adapter the reference of a job's steps, if it compares with one."""
        reference = job.prepared.reference
        if job.runs_reference and reference is not None:
            self._executor.refer(slot, reference)

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Counts the time of the block, which is then no time of training."""
        self._executor.wait()  # the pending microbatch counts as training
        began = time.perf_counter()
        with self._run.watch.on(what):
            yield
        self._seconds_aside += time.perf_counter() - began

    def clock(self) -> float:
        """Returns the seconds of a clock that stands still during this work."""
        return time.perf_counter() - self._seconds_aside

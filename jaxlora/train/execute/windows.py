"""Runs the windows of a run: starts, pauses and ends jobs, and handles their steps.

A window is the next few optimizer steps of every running job, packed together. If a job
ends within a window, its slot is released as soon as the host knows, and its remaining
samples do not run. Jobs start, pause and continue only between windows.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

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
from jaxlora.scheduler import Sample
from jaxlora.scheduler.stream import PlanAhead, Planned
from jaxlora.train.execute.executor import Executor, Outcomes, StepOutcome, Window
from jaxlora.train.execute.samples import MakeSamples
from jaxlora.train.job_state import JobState
from jaxlora.train.plan.next_window import (
    JobPosition,
    assign_slots,
    pack_window,
    positions_after,
    window_samples,
)
from jaxlora.train.plan.run_plan import RunPlan
from jaxlora.train.requests import Requests

logger = logging.getLogger(__name__)


class Windows:
    """Runs one window after another.

    Attributes:
        jobs: Jobs of the run; more may be added between windows.
        round: Rounds done. A round is one optimizer step of every running job; a
            window of w steps is w rounds, and its k-th step of a job belongs to the
            k-th of them.
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
        """Makes the object; `start` starts the first jobs.

        Args:
            plan: The plan of the run.
            jobs: Jobs of the run; more may be added between windows.
            executor: Runs the windows.
            first_round: Rounds done before.
            requests: Requests to stop and to pause jobs; more may come at any time.
            export: Writes a job's adapter.
            send: Sends an event to the callbacks.
            make_samples: Generates texts with the adapters in slots, for evaluations.
        """
        self._plan, self._config = plan, plan.config
        self.jobs, self._executor = jobs, executor
        config, lanes = plan.config, plan.lanes
        self._requests, self._export = requests, export
        self._send, self._make_samples = send, make_samples
        self._plans = PlanAhead(
            lambda s: pack_window(s, config.limits, config.packer, lanes), lanes
        )
        self.round = first_round
        self._steps_now: dict[str, int] = {}  # of each job in the current window
        self._left_out: dict[str, int] = {}  # samples that do not run, by job
        self._untimed_seconds = 0.0  # time in the window that is not spent on training

    def __enter__(self) -> "Windows":
        return self

    def __exit__(self, *_) -> None:
        self._plans.close()

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

    def _assign_slots(self, positions: Sequence[JobPosition]) -> list[JobPosition]:
        return assign_slots(
            positions,
            self._plan.num_slots,
            preempts=self._config.preempt,
            lanes=self._plan.lanes,
        )

    def _samples(self, positions: Sequence[JobPosition]) -> tuple[Sample, ...]:
        def lengths(job: int, step: int) -> list[int]:
            return self.jobs[job].prepared.lengths(step)

        return window_samples(positions, self._config.window_steps, lengths)

    def start(self) -> bool:
        """Ends, pauses and starts jobs before a window; False if none is left to run.

        Jobs that start for the first time are evaluated.
        """
        self._steps_now.clear()
        num_left = self._end_jobs(self.jobs)  # stopped since the last window
        num_left += self._pause_by_request()
        positions = self._assign_slots(self._positions())
        num_left += self._pause_for_priority(positions)
        num_left += self._start_jobs(positions)
        if num_left and not self._running():
            self.round += 1  # the round of the events above, as no window follows
        return bool(self._positions())

    def _pause_by_request(self) -> int:
        """Pauses running jobs that were asked to pause; returns how many."""
        count = 0
        for job in self._running():
            if (reason := self._requests.pause_reason(job.name)) is not None:
                self._pause(job, reason)
                count += 1
        return count

    def _pause_for_priority(self, positions: Sequence[JobPosition]) -> int:
        """Pauses running jobs without a slot in the next window; returns how many."""
        jobs = [self.jobs[p.job] for p in positions if p.slot is None]
        paused = [job for job in jobs if job.has_slot]
        for job in paused:
            self._pause(job, "a job of higher priority has its slot")
        return len(paused)

    def _start_jobs(self, positions: Sequence[JobPosition]) -> int:
        """Starts jobs that get a slot, and evaluates them if due; returns how many end.

        A job that was paused continues, and is not evaluated again.
        """
        new = []
        for position in positions:
            job = self.jobs[position.job]
            if position.slot is None or job.has_slot:
                continue
            if job.parked is None:
                new.append(job)
            self._start(job, position.slot)
        self._evaluate([job for job in new if job.wants_eval()])
        return self._end_jobs(new)

    def _pause(self, job: JobState, reason: str) -> None:
        """Parks the whole state of a running job, and frees its slot."""
        job.parked = self._executor.park(job.slot)
        job.update(status="paused", reason=reason, slot=None)
        logger.info("%s: paused. %s", job.name, reason)
        self._send_of(job, JobPauseEvent, reason=reason)

    def _start(self, job: JobState, slot: int) -> None:
        """Loads a job into a free slot: its first adapter, or its parked state."""
        parked, job.parked = job.parked, None
        job.update(status="running", reason="", slot=slot)
        if parked is None:
            self._executor.load(slot, job.start, job.settings.optimizer)
            logger.info("%s starts in slot %d", job.name, slot)
            self._send_of(job, JobStartEvent, slot=slot)
            return
        self._executor.restore(slot, parked, job.like)
        logger.info("%s continues in slot %d", job.name, slot)
        self._send_of(job, JobResumeEvent, slot=slot)

    def _send_of(self, job: JobState, kind: type[JobEvent], **values) -> None:
        """Sends an event of a job at the step that it has reached."""
        event = kind(
            round=self._round_of(job),
            job=job.name,
            progress=job.progress,
            num_steps=job.num_steps,
            **values,
        )
        self._send(event)

    # ---- a window ------------------------------------------------------------------

    def run_next(self) -> None:
        """Runs a window; does nothing if all jobs ended at their first evaluation."""
        running = self._running()
        if not running:
            return
        positions = self._positions()
        planned = self._plans.take(self._samples(positions))
        self._plan_ahead(positions)
        self._left_out, self._untimed_seconds = {}, 0.0
        num_microbatches = num_tokens = 0
        began = time.perf_counter()
        jobs = {job.slot: job for job in running}
        window = Window(jobs=jobs, schedule=planned.schedule)
        for outcomes in self._executor.run(window):
            num_microbatches += outcomes.num_microbatches
            num_tokens += outcomes.num_tokens
            self._handle(outcomes)
        seconds = time.perf_counter() - began - self._untimed_seconds
        self.round += max(self._steps_now.values())
        self._end_window(planned, num_microbatches, num_tokens, seconds)

    def _plan_ahead(self, positions: Sequence[JobPosition]) -> None:
        """Starts planning the window that follows if no job joins or ends early."""
        expected = positions_after(positions, self._config.window_steps)
        if expected:
            self._plans.prepare(self._samples(self._assign_slots(expected)))

    def _handle(self, outcomes: Outcomes) -> None:
        """Handles results of optimizer steps: evaluates jobs, and ends them if due."""
        stepped = [r for r in self._running() if r.slot in outcomes.steps]
        for job in stepped:
            outcome = outcomes.steps[job.slot]
            self._note(job, outcome)
        self._evaluate(
            [r for r in stepped if r.progress.status == "running" and r.wants_eval()]
        )
        self._end_jobs(stepped)

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        """Excludes the time of the block from the window's training time."""
        self._executor.wait()  # the pending microbatch counts as training
        began = time.perf_counter()
        yield
        self._untimed_seconds += time.perf_counter() - began

    def _round_of(self, job: JobState) -> int:
        """Returns the round of a job's latest step in the window, or the next round."""
        return self.round + self._steps_now.get(job.name, 1)

    def _note(self, job: JobState, outcome: StepOutcome) -> None:
        name = job.name
        self._steps_now[name] = self._steps_now.get(name, 0) + 1
        if not outcome.is_finite:
            job.update(
                status="failed",
                reason=f"loss {outcome.loss:g} with gradient norm "
                f"{outcome.grad_norm:g} in step {job.progress.step + 1} is not finite; "
                "lower learning_rate or set max_grad_norm",
            )
            return
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

    def _end_window(
        self, planned: Planned, num_microbatches: int, num_tokens: int, seconds: float
    ) -> None:
        """Sends the figures of a window."""
        for name, count in self._left_out.items():
            logger.info(
                "%s: %s of this window did not run, as it had ended",
                name,
                counted(count, "sample"),
            )
        rows = num_microbatches * self._config.limits.capacity
        event = WindowEvent(
            round=self.round,
            num_rounds=max(self._steps_now.values()),
            num_tokens=num_tokens,
            seconds=round(seconds, 4),
            tokens_per_second=round(num_tokens / seconds, 1),
            num_microbatches=num_microbatches,
            fill=round(num_tokens / rows, 4),
            planned_ahead=planned.ahead,
            planning_seconds=round(planned.waited_seconds, 4),
            left_out=self._left_out,
            pipeline=self._plan.pipeline_figures(planned.schedule),
        )
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
            num_left_out = self._executor.release(job.slot)
            if num_left_out:
                self._left_out[job.name] = num_left_out
            job.update(slot=None)
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

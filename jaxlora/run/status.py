"""The state of a run as its events tell it, for displays and for other processes."""

import collections
import dataclasses
import time
from typing import Any

from jaxlora.run.callback import Callback
from jaxlora.run.events import (
    Event,
    JobAddEvent,
    JobEvent,
    RunEndEvent,
    RunStartEvent,
    WindowEvent,
)
from jaxlora.run.job_progress import JobStatus
from jaxlora.run.saved_fields import STRICT


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """State of a run.

    Attributes:
        jobs: The jobs, in the order in which they joined.
        round: Rounds done.
        num_slots: Number of jobs that train at the same time.
        tokens_per_second: Speed of the latest window; None before the first.
        bubble: Estimated share of the time in which pipeline stages are idle in the
            latest window; None without stages.
        seconds_left: Estimated time until all jobs have ended; None if unknown.
        is_live: Whether a process trains the run.
    """

    __pydantic_config__ = STRICT

    jobs: tuple[JobStatus, ...]
    round: int
    num_slots: int
    tokens_per_second: float | None = None
    bubble: float | None = None
    seconds_left: float | None = None
    is_live: bool = True

    def status_of(self, job: JobStatus) -> str:
        """Returns the status of a job for users."""
        return job.progress.shown_status(is_live=self.is_live)

    def values(self) -> dict[str, Any]:
        """Returns the state as JSON values, with the statuses for users."""
        values = dataclasses.asdict(self)
        for shown, job in zip(values["jobs"], self.jobs, strict=True):
            shown["progress"]["status"] = self.status_of(job)
        return values

    @property
    def counts(self) -> dict[str, int]:
        """Number of jobs by status, of those that occur."""
        found = collections.Counter(map(self.status_of, self.jobs))
        order = ("running", "interrupted", "failed", "waiting", "paused", "finished")
        return {s: found[s] for s in dict.fromkeys((*order, *found)) if found[s]}

    @property
    def done_fraction(self) -> float:
        """Share of the tokens of all jobs that is done, between 0 and 1."""
        total = sum(job.total_tokens for job in self.jobs)
        return sum(job.done_tokens for job in self.jobs) / total if total else 1.0


class StatusTracker(Callback):
    """Follows a run's events, and returns its state at any time."""

    def __init__(self):
        self._status = RunStatus(jobs=(), round=0, num_slots=0)
        self._forget()

    def _forget(self) -> None:
        self._jobs: dict[str, JobStatus] = {}
        self._began: float | None = None  # end of the first window
        self._before: dict[str, float] = {}  # tokens done by then, by job
        # When the time left was estimated last, and the estimate.
        self._estimated, self._seconds = 0.0, -1.0

    def on_event(self, event: Event) -> None:
        """Updates the state by an event."""
        if isinstance(event, RunStartEvent):
            self._start(event)
        elif isinstance(event, JobAddEvent):
            self._add(event.info)
        elif isinstance(event, JobEvent):
            self._jobs[event.job] = dataclasses.replace(
                self._jobs[event.job], progress=event.progress
            )
        elif isinstance(event, WindowEvent):
            self._note_window()
            self._status = dataclasses.replace(
                self._status,
                round=event.round,
                tokens_per_second=event.tokens_per_second,
                bubble=event.pipeline.get("bubble"),
            )
        elif isinstance(event, RunEndEvent):
            self._status = dataclasses.replace(self._status, is_live=False)

    def _start(self, event: RunStartEvent) -> None:
        self._status = RunStatus(jobs=(), round=event.round, num_slots=event.num_slots)
        self._forget()
        for info in event.jobs:
            self._add(info)

    def _add(self, job: JobStatus) -> None:
        self._jobs[job.name] = job
        self._before[job.name] = job.done_tokens  # in another run, perhaps

    def _note_window(self) -> None:
        """Estimates the time left from the windows of this process but the first.

        Programs are compiled in the first window, and all jobs are evaluated before it.
        Tokens count when their global batch is complete.
        """
        now, jobs = time.perf_counter(), self._jobs.values()
        done = {job.name: job.done_tokens for job in jobs}
        if self._began is None:
            self._began, self._before = now, done
            return
        left = sum(max(0.0, job.total_tokens - job.done_tokens) for job in jobs)
        tokens = sum(count - self._before[name] for name, count in done.items())
        if tokens > 0:
            self._estimated, self._seconds = now, (now - self._began) * left / tokens

    def _seconds_left(self) -> float | None:
        """Returns the time left, which only counts down between two windows."""
        if all(job.done_tokens >= job.total_tokens for job in self._jobs.values()):
            return 0.0
        if self._seconds < 0:
            return None
        return max(0.0, self._seconds - (time.perf_counter() - self._estimated))

    def status(self) -> RunStatus:
        """Returns the state of the run now."""
        jobs, left = tuple(self._jobs.values()), self._seconds_left()
        return dataclasses.replace(self._status, jobs=jobs, seconds_left=left)

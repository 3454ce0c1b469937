"""The jobs of a live run: those that train, those that join, and requests for them."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxlora.config import LoraJob
from jaxlora.distributed import agreement
from jaxlora.errors import ConfigError
from jaxlora.train.cloning import fix_start, refusal, settings_of_copy
from jaxlora.train.job_state import JobState
from jaxlora.train.requests import Requests

# Reasons of requests that give none.
STOPPED, PAUSED = "stopped by request", "paused by request"


class LiveJobs:
    """The jobs of a run, which may come and go while it trains.

    Any thread may call the methods, except `take`.

    Attributes:
        jobs: The jobs, in the order in which they were given or have joined.
        added: Names of those that joined while the run trained.
        requests: Requests to stop and to pause jobs.
    """

    def __init__(
        self,
        jobs: list[JobState],
        added: Sequence[str],
        open_job: Callable[[LoraJob], JobState],
    ):
        """Makes the object.

        Args:
            jobs: Jobs that the run has so far.
            added: Names of those that have joined it in an earlier process.
            open_job: Reads a job's data and checks that it fits the run.
        """
        self.jobs, self.added, self.requests = jobs, list(added), Requests()
        self._names = [job.name for job in jobs]  # also of jobs that are being opened
        self._open_job = open_job
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._waiting: deque[JobState] = deque()

    # ---- what users ask for; see `Trainer` -----------------------------------------

    def add(self, settings: LoraJob) -> None:
        """Adds a job: reserves its name, opens it and lets it join."""
        self.reserve(settings)
        try:
            job = self.open(settings)
            if reason := self.refusal(job):
                raise ConfigError(reason)
            self.join(job)
        except BaseException:
            self.release(settings.name)
            raise

    def clone(self, name: str, new_name: str | None, changes: dict[str, Any]) -> None:
        """Adds a copy of a job."""
        self.add(self.copy_settings(name, new_name, changes))

    def stop(self, name: str, reason: str) -> None:
        """Asks for a job to end."""
        self._check_name(name)
        self.requests.stop(name, reason)

    def pause(self, name: str, reason: str) -> None:
        """Asks for a job to leave its slot."""
        self._check_name(name)
        self.requests.pause(name, reason)

    def resume(self, name: str) -> None:
        """Allows a paused job to continue."""
        self._check_name(name)
        self.requests.resume(name)

    def is_asked_to_pause(self, name: str) -> bool:
        """Whether a user has asked for a job to pause."""
        return self.requests.pause_reason(name) is not None

    def copy_settings(
        self, name: str, new_name: str | None, changes: dict[str, Any]
    ) -> LoraJob:
        """Returns the settings of a copy of a job; see `settings_of_copy`."""
        self._check_name(name)
        return settings_of_copy(self.jobs, name, new_name, changes)

    def _check_name(self, name: str) -> None:
        if name not in self._names:
            raise ConfigError(
                f"there is no job {name!r}; there are: {', '.join(self._names)}."
            )

    # ---- joining, step by step -----------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Number of jobs that are about to join."""
        return len(self._waiting)

    def reserve(self, settings: LoraJob) -> None:
        """Takes the name of a job that will join.

        Raises:
            ConfigError: A job has this name already.
        """
        with self._lock:
            if settings.name.lower() in {name.lower() for name in self._names}:
                name = settings.name
                raise ConfigError(f"a job named {name!r} is in this run already.")
            self._names.append(settings.name)

    def release(self, name: str) -> None:
        """Gives up the name of a job that does not join."""
        with self._lock:
            self._names.remove(name)

    def drop(self, name: str) -> None:
        """Takes back a job that has joined, as if it never had."""
        self.jobs[:] = [job for job in self.jobs if job.name != name]
        self.added.remove(name)
        self.release(name)

    def open(self, settings: LoraJob) -> JobState:
        """Reads a job's data, one job at a time.

        Raises:
            JaxloraError: The job does not fit the run.
        """
        with self._opening:
            return self._open_job(settings)

    def refusal(self, job: JobState) -> str:
        """Returns why an opened job cannot join any more; empty if it can."""
        return refusal(job, self.jobs)

    def join(self, job: JobState) -> None:
        """Lets an opened job join when the run looks for it."""
        self._waiting.append(job)

    def take(self) -> list[JobState]:
        """Moves jobs that have joined into the run, the same ones on all processes.

        The thread that trains calls it.

        Returns:
            The jobs.
        """
        waiting = {job.name: job for job in tuple(self._waiting)}
        names = agreement.added_everywhere([job.prepared for job in waiting.values()])
        taken = [waiting[name] for name in names]
        for job in taken:
            self._waiting.remove(job)
            fix_start(job, self.jobs)
            self.jobs.append(job)
            self.added.append(job.name)
        return taken

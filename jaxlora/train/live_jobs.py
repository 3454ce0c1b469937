"""The jobs of a live run: those that train, those that join, and requests for them."""

import dataclasses
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxlora.adapters.parked_slot import ParkedSlot
from jaxlora.config import LoraJob
from jaxlora.distributed import agreement, processes
from jaxlora.errors import ConfigError
from jaxlora.run.clone_settings import clone_settings
from jaxlora.run.saved_run import SavedRequests
from jaxlora.train.job_state import JobState

logger = logging.getLogger(__name__)

# Reasons of requests that give none.
STOPPED, PAUSED = "stopped by request", "paused by request"

_Kind = Literal["stopping", "pausing"]  # as the record of the run has them


class LiveJobs:
    """The jobs of a run, which may come and go while it trains.

    Any thread may call the methods for users. The thread that trains calls the others,
    and reads the requests between global batches. If several processes train the run,
    requests take effect when the processes `agree`, so that all of them act alike.

    Attributes:
        jobs: The jobs, in the order in which they were given or have joined.
        added: Names of those that joined while the run trained.
        version: Changes with each request; if it does, there may be a new one.
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
        self.jobs, self.added = jobs, list(added)
        self._names = [job.name for job in jobs]  # also of jobs that are being opened
        self._open_job = open_job
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._waiting: deque[JobState] = deque()
        # The latest request for each job, and why; None: it may run again. To make one
        # is a single write to a dict, and so needs no lock.
        self._asked: dict[tuple[_Kind, str], str | None] = {}
        self._new = self._asked if processes.count() == 1 else {}
        self._count = itertools.count(1)  # `next` of it is atomic
        self.version = 0

    # ---- what users ask for; see `Trainer` -----------------------------------------

    def add(self, settings: LoraJob) -> None:
        """Adds a job: reserves its name, opens it and lets it join."""
        self.reserve(settings)
        try:
            self.join(self.open(settings))
        except BaseException:
            self.release(settings.name)
            raise

    def stop(self, name: str, reason: str) -> None:
        """Asks for a job to end after its current global batch."""
        self._ask("stopping", name, reason)

    def pause(self, name: str, reason: str) -> None:
        """Asks for a job to leave its slot after its current global batch."""
        self._ask("pausing", name, reason)

    def resume(self, name: str) -> None:
        """Allows a paused job to continue."""
        self._ask("pausing", name, None)

    def _ask(self, kind: _Kind, name: str, why: str | None) -> None:
        self._check_name(name)
        self._new[kind, name] = why
        self.version = next(self._count)

    def find(self, name: str) -> JobState | None:
        """Returns a job that has not ended; None if it is about to join.

        Raises:
            ConfigError: There is no such job, or it has ended.
        """
        self._check_name(name)
        job = next((job for job in self.jobs if job.name == name), None)
        if job is not None and job.progress.is_over:
            raise ConfigError(
                f"job {name!r} has ended already ({job.progress.status}): "
                f"{job.progress.reason}."
            )
        return job

    def settings_of_copy(
        self, name: str, new_name: str | None, changes: Mapping[str, Any]
    ) -> LoraJob:
        """Returns the settings of a copy of a job; see `clone_settings`.

        Raises:
            ConfigError: There is no such job, it has ended or not joined yet, or a
                setting cannot change.
        """
        return clone_settings(self._parent(name).settings, changes, new_name)

    def _parent(self, name: str) -> JobState:
        """Returns a job that can be copied."""
        if (job := self.find(name)) is None:
            raise ConfigError(f"job {name!r} is about to join the run. Ask again.")
        return job

    def _check_name(self, name: str) -> None:
        if name not in self._names:
            raise ConfigError(
                f"there is no job {name!r}; there are: {', '.join(self._names)}."
            )

    # ---- requests, as the thread that trains reads them ----------------------------

    def agree(self) -> None:
        """Puts the requests made on any process into force on all of them."""
        if processes.count() == 1:
            return
        # Other threads may add to the dict meanwhile.
        mine = [(*key, self._new.pop(key)) for key in list(self._new)]
        for asked in processes.gather(mine):
            self._asked |= {(kind, name): why for kind, name, why in asked}
        self.version = next(self._count)

    def stop_reason(self, name: str) -> str | None:
        """Returns why a job was asked to stop; None if it was not."""
        return self._asked.get(("stopping", name))

    def pause_reason(self, name: str) -> str | None:
        """Returns why a job was asked to pause; None if it may run."""
        return self._asked.get(("pausing", name))

    def saved_requests(self) -> SavedRequests:
        """Returns the requests that are in force for the jobs."""
        found: SavedRequests = {"stopping": {}, "pausing": {}}
        for kind, reasons in found.items():
            for job in self.jobs:
                if (why := self._asked.get((kind, job.name))) is not None:
                    reasons[job.name] = why
        return found

    def restore_requests(self, saved: SavedRequests) -> None:
        """Adds saved requests; those made since then take precedence."""
        for kind, reasons in saved.items():
            for name, reason in reasons.items():
                self._asked.setdefault((kind, name), reason)

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

    def join(self, job: JobState) -> None:
        """Lets an opened job join when the run looks for it.

        Raises:
            ConfigError: It cannot join as a copy any more.
        """
        if (origin := job.settings.clone_of) is not None:
            parent = self._parent(origin.job)
            if parent.next_border > job.num_steps:
                raise ConfigError(
                    f"job {origin.job!r} has done {parent.progress.step} steps, and "
                    f"the copy is to have {job.num_steps}. Raise steps or epochs."
                )
        self._waiting.append(job)

    def take(self) -> list[JobState]:
        """Moves jobs that have joined into the run, the same ones on all processes.

        Returns:
            The jobs.
        """
        waiting = {job.name: job for job in tuple(self._waiting)}
        names = agreement.added_everywhere([job.prepared for job in waiting.values()])
        taken = [waiting[name] for name in names]
        for job in taken:
            self._waiting.remove(job)
            self._fix_start(job)
            self.jobs.append(job)
            self.added.append(job.name)
        return taken

    def _fix_start(self, job: JobState) -> None:
        """Decides at which step of the other job a copy starts, unless it is given."""
        origin = job.settings.clone_of
        if origin is not None and origin.step is None:
            (parent,) = [other for other in self.jobs if other.name == origin.job]
            at = origin.replace(step=parent.next_border)
            settings = job.settings.replace(clone_of=at)
            job.prepared = dataclasses.replace(job.prepared, settings=settings)

    # ---- copies, once they have joined ---------------------------------------------

    def start_copies(
        self, at_border: Sequence[JobState], copy: Callable[[int], ParkedSlot]
    ) -> bool:
        """Gives copies the states of jobs that have come to the step; whether it did.

        Args:
            at_border: The jobs that are between two batches, or have no slot.
            copy: Returns the state of a slot.
        """
        parents, has_started = {job.name: job for job in at_border}, False
        for clone in self.jobs:
            if (origin := clone.awaits) is None:
                continue
            parent = parents.get(origin.job)
            if parent is None or parent.progress.step != origin.step:
                continue
            has_state = parent.has_slot and parent.progress.status != "failed"
            state = copy(parent.slot) if has_state else parent.parked
            if state is not None:
                clone.start_as_copy(parent, state)
                what = "%s: a copy of %s at step %d"
                logger.info(what, clone.name, parent.name, origin.step)
                has_started = True
        return has_started

    def fail_late_copies(self) -> list[JobState]:
        """Marks the copies of jobs that will not come to the step as failed."""
        found = []
        for clone in self.jobs:
            if (origin := clone.awaits) is None or origin.step is None:
                continue
            for parent in [job for job in self.jobs if job.name == origin.job]:
                step, is_over = parent.progress.step, parent.progress.is_over
                if is_over or step > origin.step:
                    what = f"{parent.name} {'ended' if is_over else 'was already'}"
                    reason = f"{what} at step {step}, and not at {origin.step}"
                    clone.update(status="failed", reason=reason)
                    found.append(clone)
        return found

"""Jobs that join a run while it trains."""

import threading
from collections import deque
from collections.abc import Callable, Iterable

from jaxlora.config import LoraJob
from jaxlora.distributed import agreement
from jaxlora.errors import ConfigError
from jaxlora.train.job_state import JobState


class Joining:
    """The names of a run's jobs, and the jobs that are about to join.

    Any thread may call the methods, except `take`.
    """

    def __init__(self, names: Iterable[str], open_job: Callable[[LoraJob], JobState]):
        """Makes the object.

        Args:
            names: Names of the jobs that the run starts with.
            open_job: Reads a job's data and checks that it fits the run.
        """
        self._names = list(names)  # also of jobs whose data are being read
        self._open_job = open_job
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._waiting: deque[JobState] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of jobs that are about to join."""
        return len(self._waiting)

    def check_name(self, name: str) -> None:
        """Checks that there is a job of this name.

        Raises:
            ConfigError: There is none.
        """
        if name not in self._names:
            raise ConfigError(
                f"there is no job {name!r}; there are: {', '.join(self._names)}."
            )

    def add(self, settings: LoraJob) -> None:
        """Adds a job: reserves its name, opens it and lets it join.

        Raises:
            JaxloraError: The name is taken, or the job does not fit the run.
        """
        self.reserve(settings)
        try:
            job = self.open(settings)
        except BaseException:
            self.release(settings.name)
            raise
        self.join(job)

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

    def open(self, settings: LoraJob) -> JobState:
        """Reads a job's data, one job at a time.

        Raises:
            JaxloraError: The job does not fit the run.
        """
        with self._opening:
            return self._open_job(settings)

    def join(self, job: JobState) -> None:
        """Lets an opened job join when the run looks for it."""
        self._waiting.append(job)

    def take(self) -> list[JobState]:
        """Returns the jobs that join now, which are the same on all processes."""
        waiting = {job.name: job for job in tuple(self._waiting)}
        names = agreement.added_everywhere([job.prepared for job in waiting.values()])
        taken = [waiting[name] for name in names]
        for job in taken:
            self._waiting.remove(job)
        return taken

"""Takes the requests of users to a live run, and answers them.

A request takes effect in memory first. Then the run's record is written with the
effect, then the requester gets the answer, and then the request is removed. After a
kill in between, the run that resumes takes the request once more. That changes nothing:
to stop, to pause and to resume a job twice is the same as once, and a job that is in
the run already with the settings to add has been added.
"""

import dataclasses
import logging
import pathlib
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from jaxlora.distributed import processes
from jaxlora.errors import ConfigError, JaxloraError
from jaxlora.run.clone_settings import settings_to_add
from jaxlora.run.live.mailbox import DONE, Answer, ControlRequest, Mailbox
from jaxlora.train.job_state import JobState
from jaxlora.train.live_jobs import PAUSED, STOPPED, LiveJobs

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5  # between looks into the folder
# Requests that may be taken and not answered yet. Others wait in the folder, so many of
# them take little of training's time.
_MAX_OPEN = 32


class Inbox:
    """Takes requests between microbatches, in the thread that trains.

    The data of a job to add are read by another thread, while training goes on.
    """

    def __init__(self, folder: pathlib.Path, live: LiveJobs):
        """Opens the folder of the requests.

        Args:
            folder: Folder of the run.
            live: The jobs of the run.

        Raises:
            ConfigError: Other users may write to the folder of the requests.
        """
        self._live = live
        self._mailbox = Mailbox(folder)
        self._answers: dict[str, Answer] = {}  # that are not written yet, by request
        self._unanswered: set[str] = set()  # requests whose answers cannot be written
        self._has_warned = False
        self._adds: dict[str, tuple[str, Future[JobState]]] = {}
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="add")
        self._looked = 0.0
        if processes.is_first():
            self._mailbox.create()

    def is_due(self) -> bool:
        """Whether to look for requests before the window ends."""
        is_late = time.monotonic() - self._looked > _POLL_SECONDS
        return is_late or self._live.num_waiting > 0

    def poll(self, *, waits: bool = False) -> bool:
        """Takes new requests, and jobs whose data have been read.

        Args:
            waits: Whether to wait for the data of jobs that are being added.

        Returns:
            Whether a request was taken or a job was added.
        """
        self._looked = time.monotonic()
        new = processes.from_first(self._new)
        for name, values in new:
            if isinstance(values, str):
                self._refuse(name, values)
            else:
                self._begin(name, ControlRequest(**values))
        if waits:
            wait([future for _, future in self._adds.values()])
        return self._finish_adds() or bool(new)

    def deliver(self) -> None:
        """Answers the requests whose effects the record already holds."""
        for name, answer in self._answers.items():
            try:
                self._mailbox.answer(name, answer)
            except (OSError, JaxloraError) as error:
                logger.warning("a request cannot be answered: %s", error)
                self._unanswered.add(name)
        self._answers.clear()

    def close(self) -> None:
        """Ends the thread that reads data."""
        self._opener.shutdown(cancel_futures=True)

    # ---- requests ------------------------------------------------------------------

    def _new(self) -> list[tuple[str, Any]]:
        """Reads the requests that were not taken yet; a text says what is wrong."""
        found: list[tuple[str, Any]] = []
        for name in self._new_names():
            try:
                request = self._mailbox.read(name)
                found.append((name, dataclasses.asdict(request)))
            except FileNotFoundError:
                continue  # withdrawn
            except ConfigError as error:
                found.append((name, str(error)))
        return found

    def _new_names(self) -> list[str]:
        """Returns the ids of requests to take now, oldest first."""
        room = _MAX_OPEN - len(self._answers) - len(self._adds)
        if room <= 0:
            return []
        try:
            names = self._mailbox.names()
        except FileNotFoundError:
            logger.warning("the folder of requests was removed; making it again")
            self._mailbox.create()
            return []
        except OSError as error:
            if not self._has_warned:
                logger.warning("requests cannot be taken any more: %s", error)
            self._has_warned = True
            return []
        taken = {*self._answers, *self._unanswered, *self._adds}
        return [name for name in names if name not in taken][:room]

    def _begin(self, name: str, request: ControlRequest) -> None:
        """Does what a request asks for, or begins to read the data of a job to add."""
        logger.info("request: %s %s", request.action, request.job)
        live, job = self._live, request.job
        try:
            if request.settings is not None:
                self._begin_add(name, request, request.settings)
                return
            live.find(job)  # refuses one that has ended
            if request.action == "stop":
                live.stop(job, request.reason or STOPPED)
            elif request.action == "pause":
                live.pause(job, request.reason or PAUSED)
            else:
                live.resume(job)
        except JaxloraError as error:
            self._refuse(name, str(error))
        else:
            self._answer(name, f"job {job!r} {DONE[request.action]}.")

    def _refuse(self, name: str, reason: str) -> None:
        logger.warning("a request was refused: %s", reason)
        self._answer(name, reason, is_accepted=False)

    def _answer(self, name: str, text: str, *, is_accepted: bool = True) -> None:
        if processes.is_first():
            self._answers[name] = Answer(is_accepted=is_accepted, text=text)

    def _begin_add(
        self, name: str, request: ControlRequest, settings: dict[str, Any]
    ) -> None:
        """Lets another thread read the data of a job that is to join."""
        if request.action == "clone":
            changes = {key: value for key, value in settings.items() if key != "name"}
            new_name = settings.get("name")
            job = self._live.settings_of_copy(request.job, new_name, changes)
        else:
            job = settings_to_add(settings)
        if any(one.settings == job for one in self._live.jobs):
            text = f"job {job.name!r} is in this run already, with these settings."
            self._answer(name, text)
            return
        self._live.reserve(job)
        self._adds[name] = job.name, self._opener.submit(self._live.open, job)

    def _finish_adds(self) -> bool:
        """Adds jobs whose data every process has read, or refuses them; if any."""
        before = len(self._adds)
        mine = {name: _result(future) for name, (_, future) in self._adds.items()}
        everywhere = processes.gather(mine)
        for name in mine:
            results = [states[name] for states in everywhere]
            if None in results:
                continue
            job, future = self._adds.pop(name)
            try:
                if reasons := [reason for reason in results if reason]:
                    raise ConfigError(reasons[0])
                self._live.join(future.result())
            except ConfigError as error:
                self._live.release(job)
                self._refuse(name, str(error))
                continue
            text = f"job {job!r} has joined the run; it starts when a slot is free."
            if origin := future.result().settings.clone_of:
                text = f"job {job!r} is a copy of {origin.job!r} after its next batch."
            self._answer(name, text)
        return len(self._adds) < before


def _result(future: Future[JobState]) -> str | None:
    """Returns why reading failed: empty if it did not, None while it still reads."""
    if not future.done():
        return None
    error = future.exception()
    if error is None:
        return ""
    if not isinstance(error, JaxloraError):
        logger.error("a job could not be added", exc_info=error)
        return f"{type(error).__name__}: {error}"
    return str(error)

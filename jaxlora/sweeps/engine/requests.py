"""Shows users the status of a sweep over several groups, and takes their requests."""

import dataclasses
import logging
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from jaxlora.errors import ConfigError, JaxloraError
from jaxlora.run.clone_settings import clone_settings, settings_to_add
from jaxlora.run.job_progress import JobProgress, JobStatus
from jaxlora.run.live.mailbox import DONE, Answer, ControlRequest, Mailbox
from jaxlora.run.live.status_file import STATUS_FILE, write_status
from jaxlora.run.status import RunStatus
from jaxlora.sweeps.engine.driver import Driver
from jaxlora.sweeps.engine.state import Configuration

logger = logging.getLogger(__name__)

_STATUS_SECONDS = 2.0
_FULL = 0.95  # share of a host's memory, above which the log warns
_DONE = DONE | {"add": "is in the queue; it starts when a group has a free slot"}


class Requests:
    """Takes requests and writes status.json, once in each round of the driver."""

    def __init__(self, folder: pathlib.Path):
        """Opens the folder of the requests.

        Raises:
            ConfigError: Other users may write to the folder of the requests.
        """
        self._folder, self._mailbox = folder, Mailbox(folder)
        self._mailbox.create()
        self._written = -_STATUS_SECONDS
        self._answers: dict[str, Answer] = {}
        self._warned: set[int] = set()

    def __call__(self, driver: Driver) -> None:
        """Does what is due."""
        # The records of the requests before are on the disk now.
        for name, answer in self._answers.items():
            self._mailbox.answer(name, answer)
        self._answers = {
            name: self._answer(driver, name) for name in self._mailbox.names()
        }
        if time.monotonic() - self._written > _STATUS_SECONDS or driver.is_ending:
            self._written = time.monotonic()
            write_status(self._folder / STATUS_FILE, run_status(driver))
            self._warn(driver)

    # ---- requests ------------------------------------------------------------------

    def _answer(self, driver: Driver, name: str) -> Answer:
        try:
            request = self._mailbox.read(name)
            text = _do(driver, request)
        except FileNotFoundError:
            return Answer(is_accepted=False, text="it was withdrawn.")
        except JaxloraError as error:
            logger.warning("a request was refused: %s", error)
            return Answer(is_accepted=False, text=str(error))
        logger.info("request: %s %s", request.action, request.job)
        return Answer(is_accepted=True, text=text)

    # ---- status --------------------------------------------------------------------

    def _warn(self, driver: Driver) -> None:
        """Warns of hosts whose memory is almost full."""
        for number, group in enumerate(driver.groups):
            used = group.memory or 0.0
            if used > _FULL and number not in self._warned:
                logger.warning(
                    "group %d: its host uses %.0f%% of its memory. Waiting "
                    "configurations are kept there: lower max_concurrent_jobs, or use "
                    "early_exit: asha.",
                    number,
                    100 * used,
                )
                self._warned.add(number)


# ---- what is asked for ---------------------------------------------------------------


def _do(driver: Driver, request: ControlRequest) -> str:
    """Does what a request asks for; returns what follows."""
    match request.action:
        case "stop":
            stop(driver, request.job, request.reason or "stopped by request")
        case "pause":
            pause(driver, request.job, request.reason or "paused by request")
        case "resume":
            resume(driver, request.job)
        case "add":
            driver.add(settings_to_add(request.settings or {}))
        case "clone":
            copy = clone(driver, request.job, request.settings or {})
            return f"job {copy!r} is a copy of {request.job!r} after its next batch."
    return f"job {request.job!r} {_DONE[request.action]}."


def clone(driver: Driver, name: str, settings: Mapping[str, Any]) -> str:
    """Adds a copy of a configuration, which starts in its group.

    Returns:
        The name of the copy.

    Raises:
        ConfigError: The configuration is in no group or has not begun itself, a
            setting cannot change, or the name is taken.
    """
    found = _open(driver, name)
    if found.group is None or found.is_moving or found.awaits_origin:
        raise ConfigError(
            f"job {name!r} has no state in a group now: it waits for a slot, or to "
            "start as a copy itself. Ask again when it trains."
        )
    changes = dict(settings)
    new_name = changes.pop("name", None)
    copy = clone_settings(found.settings, changes, new_name)
    driver.add(copy)
    return copy.name


def stop(driver: Driver, name: str, reason: str) -> None:
    """Ends a configuration, after its current global batch."""
    found = _open(driver, name)
    driver.record("asked_to_stop", name=name, reason=reason)
    if found.group is not None:
        driver.ask(found, "stop", reason)
    elif not found.sources:
        progress = JobProgress(status="stopped", reason=reason)
        driver.note_end(None, name, progress)


def pause(driver: Driver, name: str, reason: str) -> None:
    """Lets a configuration leave its slot."""
    found = _open(driver, name)
    driver.record("held", name=name, reason=reason)
    driver.ask(found, "pause", reason)
    driver.review()


def resume(driver: Driver, name: str) -> None:
    """Lets a configuration that was paused go on."""
    found = _open(driver, name)
    driver.record("held", name=name, reason=None)
    driver.ask(found, "resume")


def _open(driver: Driver, name: str) -> Configuration:
    found = driver.state.configurations.get(name)
    if found is None:
        names = ", ".join(driver.state.configurations)
        raise ConfigError(f"there is no job {name!r}; there are: {names}.")
    if found.is_closed:
        raise ConfigError(f"job {name!r} has ended: {found.progress.reason}.")
    return found


def run_status(driver: Driver) -> RunStatus:
    """Returns the state of a sweep, with the slots of all groups numbered on."""
    first, jobs = [0], []
    for group in driver.groups:
        first.append(first[-1] + group.num_slots)
    for found in driver.state.configurations.values():
        progress = found.progress
        if not found.is_closed:
            is_given = found.group is not None
            slot = progress.slot if is_given else None
            status = progress.status if is_given else "waiting"
            if found.held is not None and slot is None:
                status = "paused"
            where = None
            if slot is not None and found.group is not None:
                where = first[found.group] + slot
            progress = dataclasses.replace(progress, status=status, slot=where)
        facts = found.facts
        jobs.append(
            JobStatus(
                name=found.name,
                rank=found.settings.rank if facts is None else facts.trained_rank,
                num_modules=0 if facts is None else facts.num_modules,
                num_steps=1 if facts is None else facts.num_steps,
                batch_tokens=1.0 if facts is None else facts.batch_tokens,
                progress=progress,
            )
        )
    speeds = [g.tokens_per_second for g in driver.groups if g.tokens_per_second]
    return RunStatus(
        jobs=tuple(jobs),
        round=max((job.progress.step for job in jobs), default=0),
        num_slots=first[-1],
        tokens_per_second=sum(speeds) if speeds else None,
        is_live=not driver.is_ending,
    )

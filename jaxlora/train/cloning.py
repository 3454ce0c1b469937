"""Copies of jobs in a live run: who may be copied, and at which step a copy starts."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlora.adapters.parked_slot import ParkedSlot
from jaxlora.config import LoraJob, RunConfig
from jaxlora.errors import ConfigError
from jaxlora.run.clone_settings import clone_settings
from jaxlora.train.job_state import JobState

logger = logging.getLogger(__name__)


def find_running(jobs: Sequence[JobState], name: str) -> JobState:
    """Returns a job that has not ended.

    Raises:
        ConfigError: It has ended, or has not joined the run yet.
    """
    for job in jobs:
        if job.name != name:
            continue
        if job.progress.is_over:
            raise ConfigError(
                f"job {name!r} has ended already ({job.progress.status}): "
                f"{job.progress.reason}."
            )
        return job
    raise ConfigError(f"job {name!r} is about to join the run. Ask again.")


def settings_of_copy(
    jobs: Sequence[JobState], name: str, new_name: str | None, changes: Mapping
) -> LoraJob:
    """Returns the settings of a copy of a job.

    Args:
        jobs: The jobs of the run.
        name: Name of the job, which is one of the run's.
        new_name: Name of the copy; None: that of the job with what changes.
        changes: Settings that differ.

    Raises:
        ConfigError: The job has ended, or a setting cannot change.
    """
    parent = find_running(jobs, name)
    return clone_settings(parent.settings, changes, new_name)


def check_copy(config: RunConfig, jobs: Sequence[JobState], job: LoraJob) -> None:
    """Checks that a job that is to join can be a copy, if it is to be one.

    Args:
        config: The run.
        jobs: Its jobs.
        job: Settings of the job.

    Raises:
        ConfigError: It differs in more than a copy may, or there is no such job.
    """
    if job.clone_of is not None:
        at = job.clone_of.replace(step=job.clone_of.step or 1)
        settings = [other.settings for other in jobs]
        config.replace(jobs=(*settings, job.replace(clone_of=at)))


def refusal(job: JobState, jobs: Sequence[JobState]) -> str:
    """Returns why a job cannot join as a copy any more; empty if it can.

    Args:
        job: The job that is to join.
        jobs: The jobs of the run.
    """
    origin = job.settings.clone_of
    if origin is None:
        return ""
    try:
        parent = find_running(jobs, origin.job)
    except ConfigError as error:
        return str(error)
    if parent.next_border <= job.num_steps:
        return ""
    return (
        f"job {origin.job!r} has done {parent.progress.step} steps, and the copy is to "
        f"have {job.num_steps}. Raise steps or epochs."
    )


def fix_start(job: JobState, jobs: Sequence[JobState]) -> None:
    """Decides at which step of the other job a copy starts, unless it is given.

    Args:
        job: The job that joins.
        jobs: The jobs of the run.
    """
    origin = job.settings.clone_of
    if origin is not None and origin.step is None:
        (parent,) = [other for other in jobs if other.name == origin.job]
        changes: dict[str, Any] = {"clone_of": origin.replace(step=parent.next_border)}
        settings = job.settings.replace(**changes)
        job.prepared = dataclasses.replace(job.prepared, settings=settings)


def start_copies(
    jobs: Sequence[JobState],
    at_border: Sequence[JobState],
    copy: Callable[[int], ParkedSlot],
) -> bool:
    """Gives copies the states of jobs that have come to the step; whether it did.

    Args:
        jobs: All jobs of the run.
        at_border: Those that are between two batches, or have no slot.
        copy: Returns the state of a slot.
    """
    waiting = [job for job in jobs if job.awaits_parent]
    parents = {job.name: job for job in at_border} if waiting else {}
    found = False
    for clone in waiting:
        origin = clone.settings.clone_of
        parent = parents.get(origin.job) if origin is not None else None
        if parent is None or origin is None or parent.progress.step != origin.step:
            continue
        has_state = parent.has_slot and parent.progress.status != "failed"
        state = copy(parent.slot) if has_state else parent.parked
        if state is not None:
            clone.start_as_copy(parent, state)
            logger.info(
                "%s: a copy of %s at step %d", clone.name, parent.name, origin.step
            )
            found = True
    return found


def end_orphans(jobs: Sequence[JobState]) -> list[JobState]:
    """Marks the copies of jobs that will not come to the step as failed."""
    waiting = [job for job in jobs if job.awaits_parent]
    by_name = {job.name: job for job in jobs} if waiting else {}
    found = []
    for clone in waiting:
        origin = clone.settings.clone_of
        parent = None if origin is None else by_name.get(origin.job)
        if origin is None or parent is None or origin.step is None:
            continue
        step = parent.progress.step
        if parent.progress.is_over or step > origin.step:
            what = "ended" if parent.progress.is_over else "was already"
            reason = f"{parent.name} {what} at step {step}, and not at {origin.step}"
            clone.update(status="failed", reason=reason)
            found.append(clone)
    return found

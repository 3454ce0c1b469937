"""Gives the jobs of a run the states that they have on the disk."""

import logging
import pathlib
from collections.abc import Sequence

from jaxlora.distributed import processes
from jaxlora.train.control import Control
from jaxlora.train.job_state import JobState
from jaxlora.train.live_jobs import LiveJobs
from jaxlora.train.open_run import OpenedRun
from jaxlora.train.saved.continue_job import (
    continue_job,
    go_on_with_reference,
    restore_jobs,
)
from jaxlora.train.saved.read_checkpoint import ReadCheckpoint
from jaxlora.train.saved.resume import FoundRun
from jaxlora.train.saved.run_store import RunStore

logger = logging.getLogger(__name__)


def check_may_resume(run: OpenedRun, *, drop_state: bool) -> FoundRun:
    """Returns what the folder holds, from which the run goes on; it is locked.

    Raises:
        CheckpointError: See `FoundRun.check`.
    """
    identity, found = run.identity(run.jobs), run.found
    prepared = [job.prepared for job in run.jobs]

    def check() -> None:
        nonlocal found
        found = found.current()
        found.check(identity, prepared, drop_state=drop_state)

    processes.from_first(check)
    return found


def restore(
    run: OpenedRun, live: LiveJobs, control: Control, store: RunStore
) -> ReadCheckpoint | None:
    """Restores jobs and requests; returns the checkpoint that has them, if any.

    Raises:
        CheckpointError: The checkpoint is damaged, or of another run.
    """
    found = store.restore(run.record(run.jobs))
    _drop_suggested(live, control, store, found)
    sweep, suggested = None, {}
    if found is not None:
        sweep, suggested = found.run.sweep, found.run.suggested
    control.restore(sweep, suggested)
    if found is not None:
        restore_jobs(run.jobs, found, run.slots, run.plan.num_slots)
        for job in [job for job in run.jobs if job.has_begun]:
            go_on_with_reference(run.folder, job, run.model.fingerprint)
        logger.info("resumed after round %d", found.number)
    live.requests.restore(store.saved_requests())
    continue_jobs(run, run.jobs)
    return found


def _drop_suggested(
    live: LiveJobs, control: Control, store: RunStore, found: ReadCheckpoint | None
) -> None:
    """Drops what was suggested after the checkpoint, as it is suggested again."""
    known = {} if found is None else found.run.progress
    record = store.record
    recorded = processes.from_first(lambda: [] if record is None else record.suggested)
    # An earlier call of `train` may have suggested some that are not recorded.
    for name in {*recorded, *control.suggested()} - known.keys():
        if name in live.added:
            live.drop(name)


def continue_jobs(run: OpenedRun, jobs: Sequence[JobState]) -> None:
    """Gives jobs that come from another run, and are new here, their states.

    Raises:
        CheckpointError: See `continue_job`.
    """
    for job in jobs:
        if job.settings.continue_from and job.progress.status == "waiting":
            continue_job(job, run.identity([job]))
            folder = pathlib.Path(job.settings.continue_from)
            go_on_with_reference(folder, job, run.model.fingerprint)

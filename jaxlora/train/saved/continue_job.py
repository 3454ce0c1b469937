"""Gives jobs the whole states that they have in a checkpoint, of this run or another.

Another run is only read, so it may be active or be resumed; a job then continues there,
too.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from jaxlora.adapters.files.export_record import read_export
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.common.atomic import find_complete_folder, replace_folder, sync_files
from jaxlora.common.counted import counted
from jaxlora.config import LoraJob
from jaxlora.errors import CheckpointError
from jaxlora.run.folder import ADAPTERS, CHECKPOINTS, RUN_FILE, begun_record
from jaxlora.run.identity import RunIdentity, check_same_run
from jaxlora.train.job_state import JobState
from jaxlora.train.saved.read_checkpoint import ReadCheckpoint, read_newest


def restore_jobs(
    jobs: Sequence[JobState], found: ReadCheckpoint, slots: StagedSlots, num_slots: int
) -> None:
    """Restores progress and states of the jobs in a checkpoint of their run.

    A running job takes its slot again. If this run has no such slot, the job is paused
    and continues in the next free slot. Jobs that are not in the checkpoint stay as
    they are.

    Args:
        jobs: All jobs of the run.
        found: The checkpoint.
        slots: The slots of the run, all empty.
        num_slots: Number of slots.
    """
    for job in jobs:
        if job.name not in found.run.progress:
            continue
        job.progress = found.run.progress[job.name]
        job.follow(found.run.places.get(job.name))
        if not job.progress.has_state:
            continue
        parked, slot = found.parked(job.name), job.progress.slot
        if slot is not None and slot < num_slots:
            slots.restore(slot, parked, job.like)
            continue
        job.parked = parked
        if slot is not None:
            reason = f"this run has no slot {slot}"
            job.update(status="paused", reason=reason, slot=None)


def continue_job(job: JobState, identity: RunIdentity) -> None:
    """Gives a job the progress and state that it has in another run's checkpoint.

    The job is paused then, and continues as soon as it gets a slot.

    Args:
        job: A job with `continue_from` that has not begun in this run.
        identity: Identity of this run.

    Raises:
        CheckpointError: See `read_continued`.
    """
    found = read_continued(job.settings, job.num_steps, identity, has_tensors=True)
    job.parked = found.parked(job.name)
    job.follow(found.run.places.get(job.name))
    job.progress = dataclasses.replace(
        found.run.progress[job.name],
        status="paused",
        reason=f"it continues from {job.settings.continue_from}",
        slot=None,
    )


def read_continued(
    job: LoraJob, num_steps: int, identity: RunIdentity, *, has_tensors: bool = False
) -> ReadCheckpoint:
    """Returns the checkpoint of another run that a job can continue from.

    Args:
        job: A job with `continue_from`.
        num_steps: Its optimizer steps in all.
        identity: Identity of a run of this job only.
        has_tensors: Whether to read the tensors, too.

    Raises:
        CheckpointError: The other run has no such job with a state, a file of it is
            damaged, the job has done more steps there than are wanted here, or the job
            or the base differ too much to continue.
    """
    assert job.continue_from is not None
    name, folder = job.name, pathlib.Path(job.continue_from)
    found = read_newest(folder / CHECKPOINTS, has_tensors=has_tensors)
    if name not in found.run.adapters:
        names = ", ".join(found.run.adapters) or "no jobs"
        raise CheckpointError(
            f"job {name!r} cannot continue from {folder}: the newest checkpoint there "
            f"has the states of {names}. A job has one between its first step and its "
            "end."
        )
    done = found.run.progress[name].step
    if done > num_steps:
        raise CheckpointError(
            f"job {name!r} has done {counted(done, 'step')} in {folder}, and the "
            f"number wanted here is {num_steps}, so it would end at once. Raise steps "
            f"or epochs to {counted(done, 'step')} or more."
        )
    then = begun_record(folder).identity.limited_to([name])
    check_same_run(identity, then, folder / RUN_FILE)
    return found


def continued_step(job: LoraJob) -> int:
    """Returns the optimizer steps that a job has done before it starts in a run.

    Raises:
        CheckpointError: The checkpoint that the job continues from cannot be used.
    """
    if job.continue_from is None:
        return 0
    found = read_newest(pathlib.Path(job.continue_from) / CHECKPOINTS)
    progress = found.run.progress.get(job.name)
    return 0 if progress is None else progress.step


def copy_best_export(job: JobState, folder: pathlib.Path) -> None:
    """Copies the best weights that a job with `keep_best` exported in another run.

    Otherwise they would be lost if no later evaluation is better.

    Args:
        job: The job.
        folder: Folder of its adapter in this run; it is left as it is if it exists.

    Raises:
        AdapterError: The export in the other run is damaged.
        StorageError: The folder cannot be written.
    """
    origin, keep_best = job.settings.continue_from, job.settings.keep_best
    if origin is None or not keep_best or os.path.lexists(folder):
        return
    source = pathlib.Path(origin) / ADAPTERS / job.name
    found = read_export(find_complete_folder(source))
    if found is not None:
        with replace_folder(folder) as temporary:
            for name, data in found.files.items():
                (temporary / name).write_bytes(data)
            sync_files(temporary)

"""Continues a job of another run, with its whole state."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from jaxlora.adapters.files.export_record import read_export
from jaxlora.adapters.optimizers.state import Kind
from jaxlora.common.atomic import find_complete_folder, replace_folder, sync_files
from jaxlora.common.counted import counted
from jaxlora.config import LoraJob
from jaxlora.errors import CheckpointError
from jaxlora.run.folder import ADAPTERS, CHECKPOINTS
from jaxlora.run.identity import RunIdentity, check_same_run
from jaxlora.train.job_state import JobState
from jaxlora.train.saved.read_checkpoint import ReadCheckpoint, read_newest


def continue_job(job: JobState, identity: RunIdentity) -> None:
    """Gives a job the progress and state that it has in another run's checkpoint.

    The job is paused then, and continues as soon as it gets a slot. The other run is
    only read, so it may be active or be resumed; the job then continues there too.

    Args:
        job: A job with `continue_from` that has not begun in this run.
        identity: Identity of this run.

    Raises:
        CheckpointError: The other run has no such job with a state, its checkpoint is
            damaged, the job has done more steps there than are wanted here, or the job
            or the base differ too much to continue.
    """
    name, folder = job.name, job.settings.continue_from
    found = _read_continued(job.settings, job.num_steps, identity, None)
    job.parked = found.parked(name)
    job.progress = dataclasses.replace(
        found.run.progress[name],
        status="paused",
        reason=f"it continues from {folder}",
        slot=None,
    )


def check_continues(job: LoraJob, num_steps: int, identity: RunIdentity) -> None:
    """Checks that a job can continue from another run, without reading its tensors.

    Args:
        job: A job with `continue_from`.
        num_steps: Its optimizer steps in all.
        identity: Identity of a run of this job only.

    Raises:
        CheckpointError: See `continue_job`.
    """
    _read_continued(job, num_steps, identity)


def _read_continued(
    job: LoraJob,
    num_steps: int,
    identity: RunIdentity,
    kinds: Sequence[Kind] | None = (),
) -> ReadCheckpoint:
    assert job.continue_from is not None
    name, folder = job.name, pathlib.Path(job.continue_from)
    found = read_newest(folder / CHECKPOINTS, kinds)
    if name not in found.tensors:
        raise CheckpointError(
            f"job {name!r} cannot continue from {folder}: the newest checkpoint there "
            f"has the states of {', '.join(found.tensors) or 'no jobs'}. A job has one "
            "between its first step and its end."
        )
    done = found.run.progress[name].step
    if done > num_steps:
        raise CheckpointError(
            f"job {name!r} has done {counted(done, 'step')} in {folder}, and the "
            f"number wanted here is {num_steps}, so it would end at once. Raise steps "
            f"or epochs to {counted(done, 'step')} or more."
        )
    then, path = found.run.identity, folder / CHECKPOINTS / str(found.number)
    then = dataclasses.replace(then, jobs={name: then.jobs[name]})
    check_same_run(identity, then, path, "the checkpoint")
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
    if job.settings.continue_from is None or not job.settings.keep_best:
        return
    source = pathlib.Path(job.settings.continue_from) / ADAPTERS / job.name
    found = (
        None if os.path.lexists(folder) else read_export(find_complete_folder(source))
    )
    if found is not None:
        with replace_folder(folder) as temporary:
            for name, data in found.files.items():
                (temporary / name).write_bytes(data)
            sync_files(temporary)

"""Gives jobs the whole states that they have on the disk, in this run or another.

Another run is only read, so it may be active or be resumed; a job then continues there,
too.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import safetensors
import safetensors.numpy

from jaxlora.adapters.files.export_record import read_export
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.common.atomic import (
    find_complete_folder,
    replace_folder,
    sync_files,
    write_bytes,
)
from jaxlora.common.counted import counted
from jaxlora.config import LoraJob
from jaxlora.errors import CheckpointError
from jaxlora.run.folder import ADAPTERS, CHECKPOINTS, RUN_FILE, begun_record
from jaxlora.run.identity import RunIdentity, check_same_run
from jaxlora.train.job_state import JobState
from jaxlora.train.saved.read_checkpoint import ReadCheckpoint, read_newest

REFERENCES = "references"


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


# ---- log-probabilities of samples by a job's reference -------------------------------
# Recomputed with another layout they would differ in their last bits, and so would all
# further steps.


def write_references(folder: pathlib.Path, job: JobState, base: str) -> None:
    """Writes the log-probabilities of a job.

    Args:
        folder: Folder of the run.
        job: The job.
        base: Fingerprint of the base.

    Raises:
        StorageError: The file cannot be written.
    """
    assert job.references is not None
    path = _references(folder, job)
    path.parent.mkdir(exist_ok=True)
    arrays = {name: np.asarray(x) for name, x in job.references.items()}
    write_bytes(path, safetensors.numpy.save(arrays, _key(job, base)))


def go_on_with_reference(folder: pathlib.Path, job: JobState, base: str) -> None:
    """Gives a job that has begun the log-probabilities that were kept, if it needs any.

    Its reference runs in each step, or does not, as before. With another number of
    steps, that could be chosen anew.

    Args:
        folder: Folder of the run.
        job: The job.
        base: Fingerprint of the base.

    Raises:
        CheckpointError: The file is missing or damaged, or is of other data or of
            another base.
    """
    path, prepared = _references(folder, job), job.prepared
    if not (prepared.chooses_reference or job.lacks_references):
        return
    found, key, failed = {}, None, None
    try:
        with safetensors.safe_open(path, framework="np") as file:
            key, names = file.metadata(), list(file.keys())
            found = {name: file.get_tensor(name) for name in names}
    except (OSError, safetensors.SafetensorError) as error:
        failed = error
    if prepared.chooses_reference:
        job.runs_reference = "train" not in found
        if failed is not None and not prepared.has_many_tokens:
            job.runs_reference = False  # they were kept, and are lost
    if not job.lacks_references:
        return
    if failed is not None:
        raise CheckpointError(
            f"{path}: log-probabilities of job {job.name!r} by its reference cannot be "
            f"read ({failed}). Without them the job cannot go on as it began: restore "
            "the file, or train into another output_dir."
        ) from failed
    batches = job.plain_batches(0).items()
    wanted = {which: len(batch.samples) for which, batch in batches}
    sizes = {name: x.size for name, x in found.items()}
    if key != _key(job, base) or sizes != wanted:
        raise CheckpointError(
            f"{path} is of other data, another base or another reference than job "
            f"{job.name!r} has. Restore the file, or train into another output_dir."
        )
    job.references = found


def _references(folder: pathlib.Path, job: JobState) -> pathlib.Path:
    return folder / REFERENCES / f"{job.name}.safetensors"


def _key(job: JobState, base: str) -> dict[str, str]:
    """Returns what the values were computed from."""
    return {"base": base} | job.reference_source()

"""Keeps the log-probabilities of samples by a job's reference, as a run resumes.

Recomputed with another layout they would differ in their last bits, and so would all
further steps.
"""

import pathlib

import numpy as np
import safetensors
import safetensors.numpy

from jaxlora.common.atomic import write_bytes
from jaxlora.errors import CheckpointError
from jaxlora.train.job_state import JobState

FOLDER = "references"


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
    path = _path(folder, job)
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
    path, prepared = _path(folder, job), job.prepared
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


def _path(folder: pathlib.Path, job: JobState) -> pathlib.Path:
    return folder / FOLDER / f"{job.name}.safetensors"


def _key(job: JobState, base: str) -> dict[str, str]:
    """Returns what the values were computed from."""
    return {"base": base} | job.reference_source()

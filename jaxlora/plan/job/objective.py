"""The objective of a job, and the adapter with which it compares."""

import pathlib

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.config import LoraJob
from jaxlora.data.objectives import find_objective, smallest_batch
from jaxlora.errors import AdapterError, ConfigError
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.names import linear_shapes


def check_objective(job: LoraJob) -> None:
    """Checks the objective of a job, its settings, and what its reference needs.

    Raises:
        ConfigError: There is no such objective, it has no such settings, its batches
            are too small, or the reference cannot be had.
        AdapterError: The folder of its reference is not there.
    """
    settings = find_objective(job.objective).settings_of(job.objective_args)
    to_start = settings.get("reference") == "start"
    how, is_stream = settings.get("reference_logps"), job.data.is_stream
    if to_start and job.init_from is None:
        raise ConfigError(
            f"objective_args: reference=start is the adapter of init_from, and job "
            f"{job.name!r} has none: an adapter starts as the base. Set init_from, or "
            "leave reference out."
        )
    fewest = smallest_batch(job.objective, job.objective_args)
    if job.batch_size < fewest:
        raise ConfigError(
            f"batch_size={job.batch_size} of job {job.name!r} must be {fewest} or more "
            f"with {job.objective}: its baseline joins the prompt of each sample in a "
            "batch to the answer of another one. Raise batch_size, which may be any "
            "number of microbatches, or choose a loss_type without a baseline."
        )
    _check_folder(job)
    if is_stream and how == "kept":
        raise ConfigError(
            f"objective_args: reference_logps=kept of job {job.name!r} needs all "
            "samples before training, and its data are streamed. Leave it out, so that "
            "the reference runs in each step; or set data.limit."
        )


def _reference_folder(job: LoraJob) -> str | None:
    """Returns the folder of the reference of a job; None: it is no further adapter."""
    settings = find_objective(job.objective).settings_of(job.objective_args)
    found = settings.get("reference")
    return None if found in (None, "base", "start") else str(found)


def _check_folder(job: LoraJob) -> None:
    """Checks that the folder of a job's reference is there, without reading it.

    Raises:
        AdapterError: It is not.
    """
    folder = _reference_folder(job)
    if folder is None or (pathlib.Path(folder) / "adapter_config.json").is_file():
        return
    cure = f"looked in {pathlib.Path.cwd()}"
    if folder.startswith("job:"):
        cure = (
            "an adapter that trains is no reference, as it moves; when that job has "
            "ended, give its folder in adapters of its output_dir to a job that is "
            "added, or to another run"
        )
    raise AdapterError(
        f"objective_args: reference={folder!r} of job {job.name!r} is neither `base` "
        f"nor `start`, and there is no PEFT folder with adapter_config.json ({cure})."
    )


def read_reference(
    job: LoraJob, model: ModelConfig, start: Adapter | None
) -> Adapter | None:
    """Reads the adapter with which the objective of a job compares.

    Args:
        job: The job.
        model: Architecture of the base model.
        start: The adapter that it starts from; None: a fresh one.

    Returns:
        The adapter; None if the reference is the base, or there is none.

    Raises:
        AdapterError: It cannot be read, or does not fit the base model.
    """
    settings = find_objective(job.objective).settings_of(job.objective_args)
    if settings.get("reference") == "start":
        return start
    folder = _reference_folder(job)
    if folder is None:
        return None
    _check_folder(job)
    try:
        found = import_peft(folder, linear_shapes(model))
        found.check_base(model)
    except AdapterError as error:
        raise AdapterError(
            f"objective_args: the reference of job {job.name!r} cannot be used. {error}"
        ) from error
    return found

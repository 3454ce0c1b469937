"""The adapter with which the objective of a job compares."""

import pathlib

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.config import LoraJob
from jaxlora.data.objectives import find_objective
from jaxlora.errors import AdapterError
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.names import linear_shapes


def refers_to_start(job: LoraJob) -> bool:
    """Whether the reference of a job is the adapter that it starts from."""
    return _setting(job) == "start"


def reference_folder(job: LoraJob) -> str | None:
    """Returns the folder of the reference of a job; None: it is no further adapter."""
    found = _setting(job)
    return None if found in (None, "base", "start") else str(found)


def _setting(job: LoraJob) -> float | str | None:
    settings = find_objective(job.objective).settings_of(job.objective_args)
    return settings.get("reference")


def check_folder(job: LoraJob) -> None:
    """Checks that the folder of a job's reference is there, without reading it.

    Raises:
        AdapterError: It is not.
    """
    folder = reference_folder(job)
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


def read_reference(job: LoraJob, model: ModelConfig) -> Adapter | None:
    """Reads the adapter with which the objective of a job compares.

    Returns:
        The adapter; None if the reference is the base or the start, or there is none.

    Raises:
        AdapterError: It cannot be read, or does not fit the base model.
    """
    folder = reference_folder(job)
    if folder is None:
        return None
    check_folder(job)
    try:
        found = import_peft(folder, linear_shapes(model))
        found.check_base(model)
    except AdapterError as error:
        raise AdapterError(
            f"objective_args: the reference of job {job.name!r} cannot be used. {error}"
        ) from error
    return found

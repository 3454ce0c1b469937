"""Checks the objective of a job before its data are read."""

from jaxlora.config import LoraJob
from jaxlora.data.objectives import find_objective
from jaxlora.errors import ConfigError
from jaxlora.train.plan.reference import check_folder


def check_objective(job: LoraJob) -> None:
    """Checks the objective of a job, its settings, and what its reference needs.

    Raises:
        ConfigError: There is no such objective, it has no such settings, or the
            reference cannot be had.
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
    check_folder(job)
    if is_stream and how == "kept":
        raise ConfigError(
            f"objective_args: reference_logps=kept of job {job.name!r} needs all "
            "samples before training, and its data are streamed. Leave it out, so that "
            "the reference runs in each step; or set data.limit."
        )

"""Checks the objective of a job before its data are read."""

from jaxlora.config import LoraJob
from jaxlora.data.objectives import find_objective, smallest_batch
from jaxlora.errors import ConfigError
from jaxlora.plan.job.reference import check_folder


def check_objective(job: LoraJob) -> None:
    """Checks the objective of a job, its settings, and what its reference needs.

    Raises:
        ConfigError: There is no such objective, it has no such settings, its batches
            are too small, or the reference cannot be had.
        AdapterError: The folder of its reference is not there.
    """
    settings = find_objective(job.objective).settings_of(job.objective_args)
    if settings.get("reference") == "start" and job.init_from is None:
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
    check_folder(job)

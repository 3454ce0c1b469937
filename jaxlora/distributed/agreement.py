"""Checks that the processes of a run agree before and while they train it."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxlora import __version__
from jaxlora.common.counted import counted
from jaxlora.config import RunConfig
from jaxlora.distributed import processes
from jaxlora.errors import ConfigError

_SAME_FILES = (
    "Give all processes the same run file, data, base model and version of jaxlora; "
    "start runs that have nothing to do with each other with --num-processes 1."
)
# Each host may have its own copies and caches of files; their contents are compared.
_FILES = ("model", "jobs", "token_cache")
_JOB_FILES = ("data", "eval_data", "init_from", "continue_from")


def check_settings(config: RunConfig) -> None:
    """Checks that all processes have the same settings, versions and devices.

    Raises:
        ConfigError: They differ.
    """
    if processes.count() == 1:
        return
    device = jax.local_devices()[0]
    values = {
        "the version of jaxlora": __version__,
        "the version of JAX": jax.__version__,
        "the kind of device": device.device_kind,
        "the names of the jobs": [job.name for job in config.jobs],
    }
    settings = config.model_dump(mode="json")
    values |= {key: v for key, v in settings.items() if key not in _FILES}
    values |= _of_jobs({job["name"]: job for job in settings["jobs"]})
    processes.check_same(values, _SAME_FILES)


def check_inputs(base: str, jobs: Sequence[Any]) -> None:
    """Checks that all processes have read the same base model and data.

    Args:
        base: Fingerprint of the base model.
        jobs: The prepared jobs.

    Raises:
        ConfigError: They differ.
    """
    values: dict[str, Any] = {"the fingerprint of the base model": base}
    values |= _of_jobs({job.settings.name: job.fingerprints for job in jobs})
    processes.check_same(values, _SAME_FILES)


def check_mesh(config: RunConfig) -> None:
    """Checks that several processes can train a run on its mesh.

    Raises:
        ConfigError: They cannot.
    """
    if processes.count() == 1:
        return
    if config.replicas is not None:
        raise ConfigError(
            f"replicas: the run has {processes.count()} processes, and replicas run in "
            "one so far. Start one process, or leave replicas out."
        )
    sizes, num_devices = config.mesh_sizes, len(jax.devices())
    if sizes.stage > 1:
        raise ConfigError(
            f"mesh {sizes} has {sizes.stage} pipeline stages, and the run has "
            f"{processes.count()} processes. Pipelines run in one process only; give "
            f"sizes of data, fsdp and tensor, whose product is {num_devices}, the "
            "number of devices of all processes."
        )
    if sizes.num_devices != num_devices:
        raise ConfigError(
            f"mesh {sizes} has {counted(sizes.num_devices, 'device')}, and the "
            f"{processes.count()} processes have {num_devices}. Give sizes of data and "
            f"fsdp whose product is {num_devices}, or start other processes."
        )
    if config.packer == "lorafusion":
        raise ConfigError(
            "packer: lorafusion stops at a time limit, so the schedules of several "
            "processes could differ. Use packer: joint or greedy."
        )


def check_newest(folder: pathlib.Path, newest: int | None) -> None:
    """Checks that all processes see the same newest checkpoint.

    Args:
        folder: The `checkpoints` folder of the run.
        newest: Number of the newest checkpoint that this process sees there, if any.

    Raises:
        ConfigError: They see different ones.
    """
    processes.check_same(
        {f"the newest checkpoint in {folder}": newest},
        "To resume, every process reads the checkpoint, so output_dir must be on a "
        "file system that all hosts share.",
    )


def added_everywhere(added: Sequence[Any]) -> list[str]:
    """Returns the names of the jobs that every process has added, in the same order.

    Args:
        added: Prepared jobs that were added on this process and have not joined the
            run.

    Raises:
        ConfigError: The processes have added jobs of the same name that differ.
    """
    by_name = {job.settings.name: job for job in added}
    names = processes.gather(list(by_name))
    taken = [name for name in names[0] if all(name in other for other in names)]
    if taken:
        values = {}
        for name in taken:
            job = by_name[name]
            values[name] = job.settings.model_dump(mode="json") | job.fingerprints
        processes.check_same(_of_jobs(values), "Add the same job on every process.")
    return taken


def _of_jobs(jobs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns values of jobs, without those that each host may have for itself."""
    return {
        f"{key} of job {name!r}": value
        for name, values in jobs.items()
        for key, value in values.items()
        if key not in _JOB_FILES
    }

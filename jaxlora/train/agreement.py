"""Checks that the processes of a run agree before and while they train it."""

import contextlib
import pathlib
import socket
from collections.abc import Iterator, Sequence

import jax

from jaxlora import __version__
from jaxlora.common.counted import counted
from jaxlora.config import RunConfig
from jaxlora.distributed import processes
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.run.lock import RunLock
from jaxlora.train.job_state import JobState
from jaxlora.train.saved.read_checkpoint import newest_checkpoint

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
    for job in settings["jobs"]:
        where = f"of job {job['name']!r}"
        values |= {f"{k} {where}": v for k, v in job.items() if k not in _JOB_FILES}
    processes.check_same(values, _SAME_FILES)


def check_inputs(base: str, jobs: Sequence[JobState]) -> None:
    """Checks that all processes have read the same base model and data.

    Args:
        base: Fingerprint of the base model.
        jobs: The jobs.

    Raises:
        ConfigError: They differ.
    """
    if processes.count() == 1:
        return
    values: dict[str, str | None] = {"the fingerprint of the base model": base}
    for job in jobs:
        for key, value in job.prepared.fingerprints.items():
            values[f"{key} of job {job.name!r}"] = value
    processes.check_same(values, _SAME_FILES)


def check_mesh(config: RunConfig) -> None:
    """Checks that several processes can train a run on its mesh.

    Raises:
        ConfigError: They cannot.
    """
    if processes.count() == 1:
        return
    sizes, num_devices = config.mesh_sizes, len(jax.devices())
    if sizes.stage > 1:
        raise ConfigError(
            f"mesh {sizes} has {sizes.stage} pipeline stages, and the run has "
            f"{processes.count()} processes. Pipelines run in one process only; give "
            f"sizes of data and fsdp, whose product is {num_devices}, the number of "
            "devices of all processes."
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


def newest_for_all(folder: pathlib.Path) -> int | None:
    """Returns the newest checkpoint, which all processes must see.

    Args:
        folder: The `checkpoints` folder of the run.

    Raises:
        CheckpointError: A process sees another one.
    """
    mine = newest_checkpoint(folder)
    first = processes.from_first(lambda: mine)
    if mine != first:
        raise CheckpointError(
            f"process {processes.index()} on {socket.gethostname()} sees checkpoint "
            f"{mine} in {folder}, and process 0 sees {first}. To resume, every process "
            "reads the checkpoint, so output_dir must be on a file system that all "
            "hosts share."
        )
    return first


def take_added(added: Sequence[JobState]) -> list[JobState]:
    """Returns the jobs that have been added on every process, in the same order.

    Args:
        added: Jobs that were added on this process and have not joined the run.

    Raises:
        ConfigError: The processes have added jobs of the same name that differ.
    """
    by_name = {job.name: job for job in added}
    names = processes.gather(list(by_name))
    taken = [name for name in names[0] if all(name in other for other in names)]
    if processes.count() > 1 and taken:
        _check_jobs([by_name[name] for name in taken])
    return [by_name[name] for name in taken]


def _check_jobs(jobs: Sequence[JobState]) -> None:
    values = {}
    for job in jobs:
        settings = job.settings.model_dump(mode="json") | job.prepared.fingerprints
        where = f"of job {job.name!r}"
        values |= {
            f"{k} {where}": v for k, v in settings.items() if k not in _JOB_FILES
        }
    processes.check_same(values, "Add the same job on every process.")


@contextlib.contextmanager
def held(lock: RunLock) -> Iterator[RunLock]:
    """Takes the lock of the run's folder, on the process that writes to it."""
    with contextlib.ExitStack() as stack:

        def take() -> None:
            stack.enter_context(lock)

        processes.from_first(take)
        yield lock

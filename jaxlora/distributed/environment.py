"""Finds this process's place in a run from flags, variables or a cluster's scheduler.

Nothing here imports JAX unless the run has several processes.
"""

import dataclasses
import os
import re
from collections.abc import Mapping

from jaxlora.errors import ConfigError

_FLAGS = {
    "coordinator": ("--coordinator", "JAX_COORDINATOR_ADDRESS"),
    "num_processes": ("--num-processes", "JAX_NUM_PROCESSES"),
    "process_id": ("--process-id", "JAX_PROCESS_ID"),
}
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:\[\]]+):(\d{1,5})")
# Variables that count the processes which a cluster's scheduler has started together,
# and the name by which JAX knows the scheduler.
_CLUSTERS = {"SLURM_STEP_NUM_TASKS": "slurm", "OMPI_COMM_WORLD_SIZE": "ompi"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """The place of this process among those of a run.

    Attributes:
        coordinator: Host and port at which process 0 coordinates the others.
        num_processes: Number of processes.
        process_id: Number of this process, from 0.
        local_device_ids: GPUs of the host that this process uses; None: all.

    Raises:
        ConfigError: The address or a number is invalid.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None

    def __post_init__(self):
        found = _ADDRESS.fullmatch(self.coordinator)
        if found is None or not 0 < int(found[2]) < 2**16:
            raise ConfigError(
                f"coordinator {self.coordinator!r} is not host:port. Give the address "
                "of process 0 and a free port there, such as node1:9000."
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"process id {self.process_id} is out of range: the ids of "
                f"{self.num_processes} processes are 0 to {self.num_processes - 1}."
            )

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The coordinator's host and port."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def find_membership(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Membership | None:
    """Decides whether this process is one of several that train a run together.

    Flags come first, then the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, and then what SLURM (srun) or Open MPI say. One process, given by
    any of them, is an ordinary run.

    Args:
        coordinator: Host and port of process 0.
        num_processes: Number of processes.
        process_id: Number of this process, from 0.

    Returns:
        The place of this process; None if the run has no other processes.

    Raises:
        ConfigError: A value is invalid, or some but not all of them are given.
    """
    given: dict[str, str | int | None] = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    for name, (_, variable) in _FLAGS.items():
        if given[name] is None:
            given[name] = os.environ.get(variable) or None
    if given["num_processes"] is not None and _count(given, "num_processes") == 1:
        return None
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return _from_cluster()
    if missing:
        raise ConfigError(_incomplete(given, missing))
    return Membership(
        coordinator=str(given["coordinator"]),
        num_processes=_count(given, "num_processes"),
        process_id=_count(given, "process_id"),
        local_device_ids=_local_device_ids(),
    )


def _count(given: Mapping[str, str | int | None], name: str) -> int:
    value = str(given[name])
    if not re.fullmatch(r"-?\d{1,9}", value):
        flag, variable = _FLAGS[name]
        raise ConfigError(f"{flag} (or {variable}) is {value!r}, which is no number.")
    return int(value)


def _incomplete(given: Mapping[str, object], missing: list[str]) -> str:
    def listed(names) -> str:
        return ", ".join(f"{_FLAGS[n][0]} (or {_FLAGS[n][1]})" for n in names)

    there = [name for name in given if name not in missing]
    return (
        f"{listed(there)} is given without {listed(missing)}. A run of several "
        "processes needs all three, for each process; an ordinary run needs none."
    )


def _local_device_ids() -> tuple[int, ...] | None:
    ids = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    if not ids:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", ids):
        raise ConfigError(
            f"JAX_LOCAL_DEVICE_IDS is {ids!r}; expected numbers of GPUs such as 0,1."
        )
    return tuple(map(int, ids.split(",")))


def _from_cluster() -> Membership | None:
    """Asks JAX for the place of a process that SLURM or Open MPI has started."""
    for variable, name in _CLUSTERS.items():
        count = os.environ.get(variable, "")
        if not count.isdecimal() or int(count) < 2:
            continue
        # Imported late, as ordinary runs need no cluster.
        from jax._src import clusters

        known = {one.name: one for one in clusters.ClusterEnv._cluster_types}
        cluster = known[name]
        if not cluster.is_env_present():
            continue
        ids = _local_device_ids()
        local = cluster.get_local_process_id()
        # Several processes on a host take one GPU each; a single one takes all of them.
        if ids is None and local is not None and not _is_alone():
            ids = (local,)
        port = os.environ.get("JAX_COORDINATOR_PORT")
        return Membership(
            coordinator=cluster.get_coordinator_address(None, port),
            num_processes=cluster.get_process_count(),
            process_id=cluster.get_process_id(),
            local_device_ids=ids,
        )
    return None


def _is_alone() -> bool:
    """Whether every host of the run has one of its processes only."""
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE")  # such as 4(x2),3
    if tasks is not None:
        return all(part.partition("(")[0] == "1" for part in tasks.split(","))
    return os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"

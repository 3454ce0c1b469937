"""Joins the processes of a run, through JAX's distributed service.

JAX detects SLURM and Open MPI, lets the processes find each other, and ends all of them
when one is lost (`jax.distributed.initialize`).
"""

import atexit
import contextlib
import dataclasses
import logging
import os
import re
import socket
import sys
from collections.abc import Collection, Iterator

import jax

from jaxlora.distributed import processes
from jaxlora.errors import ConfigError, DeviceError, ProcessError

logger = logging.getLogger(__name__)

LOST_SECONDS = 60
_FLAGS = {
    "coordinator": ("--coordinator", "JAX_COORDINATOR_ADDRESS"),
    "num_processes": ("--num-processes", "JAX_NUM_PROCESSES"),
    "process_id": ("--process-id", "JAX_PROCESS_ID"),
}
# Variables that count the processes which a cluster's scheduler has started together.
_CLUSTERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """The place of this process among those of a run.

    Attributes:
        coordinator: Host and port at which process 0 coordinates the others; None, like
            the others, where a cluster's scheduler has started them, which JAX asks.
        num_processes: Number of processes.
        process_id: Number of this process, from 0.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


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
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS") or None
    num_processes = _number("num_processes", num_processes)
    process_id = _number("process_id", process_id)
    if num_processes == 1:
        return None
    given = dict(zip(_FLAGS, (coordinator, num_processes, process_id), strict=True))
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        counts = [os.environ.get(variable, "") for variable in _CLUSTERS]
        is_one_of_several = any(n.isdecimal() and int(n) > 1 for n in counts)
        return Membership() if is_one_of_several else None
    if coordinator is None or num_processes is None or process_id is None:
        raise ConfigError(
            f"{_listed(given.keys() - missing)} is given without {_listed(missing)}. A "
            "run of several processes needs all three, for each process; an ordinary "
            "run needs none."
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"coordinator {coordinator!r} is not host:port. Give the address of "
            "process 0 and a free port there, such as node1:9000."
        )
    if not 0 <= process_id < num_processes:
        raise ConfigError(
            f"process id {process_id} is out of range: the ids of {num_processes} "
            f"processes are 0 to {num_processes - 1}."
        )
    return Membership(
        coordinator=coordinator, num_processes=num_processes, process_id=process_id
    )


def _number(name: str, given: int | None) -> int | None:
    """Returns a number that is given by a flag, or else by its variable, if any is."""
    flag, variable = _FLAGS[name]
    if given is not None or not (text := os.environ.get(variable)):
        return given
    if not re.fullmatch(r"-?\d{1,9}", text):
        raise ConfigError(f"{variable} (or {flag}) is {text!r}, which is not a number.")
    return int(text)


def _listed(names: Collection[str]) -> str:
    flags = (_FLAGS[name] for name in _FLAGS if name in names)
    return ", ".join(f"{flag} (or {variable})" for flag, variable in flags)


def local_device_ids() -> tuple[int, ...] | None:
    """Returns the GPUs of this host that one process of several uses; None: all.

    JAX gives each process of a cluster the GPU of its number on the host. A process
    that is alone on its host takes all of them here.

    Raises:
        ConfigError: JAX_LOCAL_DEVICE_IDS does not list numbers.
    """
    ids = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    if ids:
        if not re.fullmatch(r"\d+(,\d+)*", ids):
            raise ConfigError(
                f"JAX_LOCAL_DEVICE_IDS is {ids!r}; give numbers of GPUs such as 0,1."
            )
        return tuple(map(int, ids.split(",")))
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE")  # such as 4(x2),3
    if tasks is not None:
        is_alone = all(part.partition("(")[0] == "1" for part in tasks.split(","))
    else:
        is_alone = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") == "1"
    number = os.environ.get("SLURM_LOCALID" if tasks else "OMPI_COMM_WORLD_LOCAL_RANK")
    return None if is_alone or number is None else (int(number),)


@contextlib.contextmanager
def joined(member: Membership, *, lost_seconds: int = LOST_SECONDS) -> Iterator[None]:
    """Connects this process to the others for the time of the block.

    No JAX computation may have run before. If a process fails or is lost, the others
    end: by an error of a computation here, or by JAX, which ends the process. After an
    error, the process must not use JAX any more.

    Args:
        member: The place of this process in the run.
        lost_seconds: Time without a sign of life after which a process is lost.

    Raises:
        ConfigError: The processes do not find each other.
        ProcessError: A computation failed, probably as another process has ended.
    """
    _connect(member, lost_seconds)
    logger.info(
        "process %d of %d, %d of %d devices",
        processes.index(),
        processes.count(),
        jax.local_device_count(),
        jax.device_count(),
    )
    if not processes.is_first():
        logging.getLogger("jaxlora").setLevel(logging.WARNING)
    try:
        yield
        processes.gather(None)  # none may leave while another still works
    except BaseException as error:
        # When Python ends, JAX would wait for the other processes. This comes before.
        atexit.register(_end, 130 if isinstance(error, KeyboardInterrupt) else 1)
        if isinstance(error, jax.errors.JaxRuntimeError | DeviceError):
            raise ProcessError(_explain(error)) from error
        raise
    jax.distributed.shutdown()


def _end(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _connect(member: Membership, lost_seconds: int) -> None:
    # JAX would take the handler of SIGTERM, which a run needs to stop between windows.
    jax.config.update("jax_enable_preemption_service", False)
    is_given = member.coordinator is not None
    try:
        jax.distributed.initialize(
            *dataclasses.astuple(member),
            local_device_ids=local_device_ids() or (),  # (): all
            cluster_detection_method="deactivate" if is_given else None,
            heartbeat_timeout_seconds=lost_seconds,
        )
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"this process on {socket.gethostname()} cannot join the others of its run "
            f"({member.coordinator or 'as the cluster says'}): {error}. Start each of "
            "them, with ids from 0, and leave the port free on the host of process 0."
        ) from error


def _explain(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return (
        f"process {processes.index()} of {processes.count()} on "
        f"{socket.gethostname()}: a computation failed: {lines[0]:.300}. If another "
        "process has ended, this is how the others notice. All checkpoints that were "
        "written are whole: start all processes again with --resume."
    )

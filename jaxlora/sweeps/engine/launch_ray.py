"""Starts the processes of workers on the hosts of a Ray cluster: a task for each.

The task has the devices of a group, and waits for the end of the same process that a
group on one host has. The process connects to the driver by itself; states and results
are files. A group whose host is gone waits until Ray has a place for it again. Without
the head, Ray ends all processes after a minute; the groups write checkpoints before.
"""

import contextlib
import logging
import math
import os
import pathlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlora.errors import ConfigError, ProcessError
from jaxlora.run.lock import LOCK_FILE, Owner, read_owner
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.sweeps.engine.launch import Launcher, Lost, Process

logger = logging.getLogger(__name__)

_AUTH_MODE = "RAY_AUTH_MODE"
_PLACE_SECONDS = 2.0  # to wait for a place, while other groups train
_LOOK_SECONDS = 5.0  # between two looks at the head and the hosts
_HEAD_SECONDS = 20.0  # without a head; Ray ends its processes after 60
_SHARE_SECONDS = 10.0  # until a host sees a file that another one has written
# The process of a group takes over these of the driver's environment variables.
_PREFIXES = ("JAX_", "JAXLORA_", "XLA_", "HF_", "TF_", "NCCL_", "XDG_CACHE_HOME")


def run_on_host(
    command: Sequence[str],
    folder: pathlib.Path,
    environ: Mapping[str, str],
    door: bytes,
    driver: Owner | None,
) -> Lost:
    """Runs the process of a group, unless this host has another folder of that name.

    This task has the devices of the group in CUDA_VISIBLE_DEVICES, and `door` goes to
    the standard input of the process.

    Returns:
        How it has ended.
    """
    if refusal := not_shared(folder, driver):
        return Lost(reason=refusal, is_final=True)
    lost = Process(command, folder, environ, door).ending(None)
    assert lost is not None
    return lost


def not_shared(folder: pathlib.Path, driver: Owner | None) -> str:
    """Returns why a group's folder is not the one that the driver has; or empty."""
    path, end = folder.parents[1] / LOCK_FILE, time.monotonic() + _SHARE_SECONDS
    while (found := read_owner(path)) != driver:
        if time.monotonic() > end:
            return (
                f"{path} on host {socket.gethostname()} names {found or 'nobody'}, and "
                f"the sweep belongs to {driver}: the hosts do not share output_dir. "
                "Put it on a file system that all of them mount at the same place."
            )
        time.sleep(0.2)
    return ""


class _Task(Process):
    """A process on a host of the cluster, by the task that waits for its end."""

    def __init__(self, launcher: "RayLauncher", place: Any, task: Any):
        self._launcher, self._place, self._task = launcher, place, task
        self._is_killed = False

    def ending(self, seconds: float | None) -> Lost | None:
        """Returns how it has ended; see `Process.ending`."""
        ray = self._launcher.ray
        if self._is_killed:
            return Lost(reason="it was killed")
        if not ray.wait([self._task], timeout=seconds)[0]:
            return None
        try:
            return ray.get(self._task)
        except ray.exceptions.RayError as error:
            return Lost(reason=str(error).strip().splitlines()[0])
        finally:
            self._leave()

    def kill(self) -> None:
        """Ends the task, and its process with it."""
        if not self._is_killed and self._launcher.has_head():
            self._launcher.ray.cancel(self._task, force=True)
        self._leave()
        self._is_killed = True

    def _leave(self) -> None:
        """Gives up the place, which may be on a host that is gone."""
        from ray.util.placement_group import remove_placement_group

        if self._launcher.has_head():  # else, nobody could, and the call would hang
            remove_placement_group(self._place)


class RayLauncher(Launcher):
    """Starts processes on the hosts of a Ray cluster, which was joined.

    Attributes:
        ray: The package.
        host: Address of this host in the cluster.
    """

    def __init__(self, command: Sequence[str], meshes: Sequence[MeshSizes]):
        """Makes the object; each group is within one host."""
        import ray

        self.ray, self.host = ray, ray.util.get_node_ip_address()
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        given = {k: v for k, v in os.environ.items() if k.startswith(_PREFIXES)}
        sizes = [mesh.num_devices for mesh in meshes]
        cpus = [{} if has_gpus else {"JAX_NUM_CPU_DEVICES": str(n)} for n in sizes]
        super().__init__(command, [given | one for one in cpus], [None] * len(cpus))
        self._needs = [
            {"CPU": 1.0} | ({"GPU": float(n)} if has_gpus else {}) for n in sizes
        ]
        self._places: dict[int, Any] = {}  # that groups wait for
        self._hosts: dict[str, str] = {}
        self._head = ray.get_runtime_context().gcs_address
        self._looked = self._head_seen = -math.inf
        self._is_lost = False
        self.look()

    def start(self, group: int, folder: pathlib.Path, door: bytes) -> Process | None:
        """Starts a task when Ray has a place for it; see `Launcher.start`."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if not self.has_head():
            return None
        needs = self._needs[group]
        if group not in self._places:
            self._places[group] = placement_group([needs], strategy="STRICT_PACK")
        if not self._places[group].wait(_PLACE_SECONDS):
            logger.info("group %d waits for a host with %s", group, needs)
            return None
        place, folder = self._places.pop(group), folder.absolute()
        task = self.ray.remote(run_on_host).options(
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0.0),
            max_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(place, 0),
        )
        environ, driver = (
            self._environs[group],
            read_owner(folder.parents[1] / LOCK_FILE),
        )
        end = task.remote(self._command, folder, environ, door, driver)
        return _Task(self, place, end)

    def has_head(self) -> bool:
        """Whether the head of the cluster can be reached."""
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), 2.0).close()
        except OSError:
            return False
        return True

    def look(self) -> None:
        """Looks for the head and the hosts; logs which have joined and left.

        Raises:
            ProcessError: The head is gone for too long; raised once.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS or self._is_lost:
            return
        self._looked = now
        if not self.has_head():
            if now - self._head_seen > _HEAD_SECONDS:
                self._is_lost = True
                raise ProcessError(
                    f"the head of the Ray cluster at {self._head} is gone. Start a "
                    "head again, and continue with --resume."
                )
            return
        self._head_seen = now
        hosts = {
            node["NodeID"]: f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"
            for node in self.ray.nodes()
            if node["Alive"]
        }
        for node in hosts.keys() - self._hosts.keys():
            logger.info("Ray: host %s is in the cluster", hosts[node])
        for node in self._hosts.keys() - hosts.keys():
            logger.warning("Ray: host %s has left the cluster", self._hosts[node])
        self._hosts = hosts


@contextlib.contextmanager
def joined_cluster(
    address: str, command: Sequence[str], meshes: Sequence[MeshSizes]
) -> Iterator[RayLauncher]:
    """Joins a Ray cluster that runs; the address is that of its head, or `auto`.

    Raises:
        ConfigError: Ray is not installed, the mode of authentication is not set, or
            there is no such cluster.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"sweep.ray is {address!r}, and Ray is not installed. Install "
            "jaxlora[ray] on all hosts, or leave sweep.ray out."
        ) from None
    if not os.environ.get(_AUTH_MODE):
        # Ray would choose a mode by whether an earlier session has left a token.
        raise ConfigError(
            f"{_AUTH_MODE} is not set, so the head, the hosts and this process may "
            f"expect different ones. Set {_AUTH_MODE}=token, with the same token, "
            "wherever ray start and jaxlora run; docs/howto/sweep_groups.md shows how."
        )
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"sweep.ray is {address!r}, and the cluster cannot be joined: {reason} "
            "Start its head with ray start --head, and give its address and token."
        ) from error
    try:
        yield RayLauncher(command, meshes)
    finally:
        ray.shutdown()

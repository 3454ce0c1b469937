"""Workers on the hosts of a Ray cluster: an actor for each group, which has a process.

The actor is not detached, so it ends with the driver. It passes lines between the
driver and the same process that a group on one host has; states and results are files.
A group whose host is gone waits until Ray has a place for it again. Without the head,
Ray ends all processes after a minute; the groups write checkpoints before.
"""

import contextlib
import logging
import math
import os
import pathlib
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlora.errors import ConfigError, ProcessError
from jaxlora.run.lock import LOCK_FILE, Owner, read_owner
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.sweeps.engine.local_workers import Worker
from jaxlora.sweeps.engine.messages import (
    Failed,
    FromWorker,
    ToWorker,
    decode,
    encode,
)
from jaxlora.sweeps.engine.workers import Lost, Workers

logger = logging.getLogger(__name__)

_AUTH_MODE = "RAY_AUTH_MODE"
_POLL_SECONDS = 0.2
_PLACE_SECONDS = 2.0  # to wait for a place, while other groups train
_SILENT_SECONDS = 60.0  # without an answer of an actor, whose host is then gone
_LOOK_SECONDS = 5.0  # between two looks at the head and the hosts
_HEAD_SECONDS = 20.0  # without a head; Ray ends its processes after 60
_SHARE_SECONDS = 10.0  # until a host sees a file that another one has written
# The process of a group takes over these of the driver's environment variables.
_PREFIXES = ("JAX_", "JAXLORA_", "XLA_", "HF_", "TF_", "NCCL_", "XDG_CACHE_HOME")


class Relay:
    """Has the process of a group on a host; one call of Ray at a time."""

    def __init__(
        self,
        command: Sequence[str],
        folder: str,
        environ: dict[str, str],
        driver: Owner | None,
    ):
        """Starts the process, unless this host has another folder of that name.

        Args:
            command: The program and its arguments.
            folder: Folder of the group's run, which all hosts share.
            environ: Environment variables besides those of this actor, which has the
                group's devices in CUDA_VISIBLE_DEVICES.
            driver: The process that has the folder of the sweep.
        """
        self._heard, self._lock = time.monotonic(), threading.Lock()
        self._worker, self._refusal = None, not_shared(pathlib.Path(folder), driver)
        if not self._refusal:
            self._worker = Worker(command, pathlib.Path(folder), environ)
            threading.Thread(
                target=self._watch, args=[self._worker], daemon=True
            ).start()

    def _watch(self, worker: Worker) -> None:
        """Lets the process end if the driver, or the way to it, is gone."""
        while worker.process.poll() is None:
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                if time.monotonic() - self._heard > _SILENT_SECONDS:
                    worker.interrupt()

    def exchange(self, lines: bytes, ends: bool) -> tuple[list[bytes], str | None]:
        """Sends lines to the process, and returns what comes soon.

        Args:
            lines: The lines.
            ends: Whether the process is to write a checkpoint and end.

        Returns:
            Its lines, and how it has ended; None if it has not.
        """
        worker = self._worker
        if worker is None:
            return [
                encode(Failed(reason=self._refusal, is_final=True))
            ], "it was refused"
        with self._lock:
            self._heard = time.monotonic()
            if lines:
                worker.send(lines)
            if ends:
                worker.interrupt()
        select.select([worker.stdout], [], [], _POLL_SECONDS)
        found, is_open = worker.read()
        return found, None if is_open else worker.wait()


def not_shared(folder: pathlib.Path, driver: Owner | None) -> str:
    """Returns why a folder is not the one that the driver has; empty if it is.

    Args:
        folder: Folder of a group's run, in that of the sweep.
        driver: The process that has locked the sweep.
    """
    path, end = folder.parents[1] / LOCK_FILE, time.monotonic() + _SHARE_SECONDS
    while (found := read_owner(path)) != driver:
        if time.monotonic() > end:
            return (
                f"{path} on host {socket.gethostname()} names {found or 'nobody'}, and "
                f"the sweep belongs to {driver}: the hosts do not share output_dir. "
                "Put it on a file system that all of them mount at the same place."
            )
        time.sleep(_POLL_SECONDS)
    return ""


class _Group:
    """The place of a group in the cluster, its actor, and what is to be sent to it."""

    def __init__(self, bundle: dict[str, float]):
        self.bundle = bundle
        self.place: Any = None
        self.actor: Any = None
        self.exchange: Any = None
        self.heard = 0.0
        self.lines, self.ends = b"", False


class RayWorkers(Workers):
    """Workers that are processes of actors."""

    def __init__(self, command: Sequence[str], meshes: Sequence[MeshSizes]):
        """Makes the object; no worker runs.

        Args:
            command: Program and arguments of every worker.
            meshes: Mesh of each group, which is within one host.
        """
        import ray

        self._ray, self._command = ray, tuple(command)
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self._environs = [
            {} if has_gpus else {"JAX_NUM_CPU_DEVICES": str(mesh.num_devices)}
            for mesh in meshes
        ]
        self._groups = [
            _Group({"CPU": 1.0} | ({"GPU": float(m.num_devices)} if has_gpus else {}))
            for m in meshes
        ]
        self._hosts: dict[str, str] = {}
        self._head = ray.get_runtime_context().gcs_address
        self._looked = self._head_seen = -math.inf
        self._is_lost = False
        self._look()

    def start(self, group: int, folder: pathlib.Path) -> bool:
        """Starts an actor when Ray has a place for it; see `Workers.start`."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        found = self._groups[group]
        if not self._has_head():
            return False
        if found.place is None:
            found.place = placement_group([found.bundle], strategy="STRICT_PACK")
        if not found.place.wait(_PLACE_SECONDS):
            logger.info("group %d waits for a host with %s", group, found.bundle)
            return False
        given = {k: v for k, v in os.environ.items() if k.startswith(_PREFIXES)}
        options = {
            "num_cpus": found.bundle["CPU"],
            "num_gpus": found.bundle.get("GPU", 0.0),
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(found.place, 0),
        }
        actor = self._ray.remote(Relay).options(**options)
        environ = given | self._environs[group]
        place, driver = folder.absolute(), read_owner(folder.parents[1] / LOCK_FILE)
        found.actor = actor.remote(self._command, str(place), environ, driver)
        found.heard, found.lines, found.ends = time.monotonic(), b"", False
        return True

    def send(self, group: int, messages: Sequence[ToWorker]) -> None:
        """Sends messages; see `Workers.send`."""
        self._groups[group].lines += b"".join(map(encode, messages))

    def receive(self, timeout: float) -> list[tuple[int, FromWorker | Lost]]:
        """Returns what has come; see `Workers.receive`.

        Raises:
            ProcessError: The head is gone; what follows still comes.
        """
        self._look()
        for group in self._groups:
            if group.actor is not None and group.exchange is None:
                group.exchange = group.actor.exchange.remote(group.lines, group.ends)
                group.lines = b""
        waiting = {g.exchange: n for n, g in enumerate(self._groups) if g.exchange}
        if not waiting:
            time.sleep(timeout)
            return []
        ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=timeout)
        if ready:  # others may have come, too
            ready, _ = self._ray.wait(
                list(waiting), num_returns=len(waiting), timeout=0
            )
        found: list[tuple[int, FromWorker | Lost]] = []
        for reference in ready:
            found += self._answer(waiting[reference], reference)
        now = time.monotonic()
        for number, group in enumerate(self._groups):
            if group.exchange and now - group.heard > _SILENT_SECONDS:
                reason = f"its actor has not answered for {_SILENT_SECONDS:g} s"
                found.append((number, self._lose(number, reason)))
        return found

    def _answer(
        self, number: int, reference: Any
    ) -> Iterator[tuple[int, FromWorker | Lost]]:
        group = self._groups[number]
        group.exchange = None
        try:
            lines, ending = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0]
            yield number, self._lose(number, reason)
            return
        group.heard = time.monotonic()
        for line in lines:
            yield number, decode(line)
        if ending is not None:
            yield number, self._lose(number, ending)

    def _lose(self, number: int, reason: str) -> Lost:
        """Ends an actor and gives up its place, which may be on a host that is gone."""
        from ray.util.placement_group import remove_placement_group

        group = self._groups[number]
        if self._has_head():  # else, nobody could do it, and these calls would hang
            self._ray.kill(group.actor)
            remove_placement_group(group.place)
        group.actor = group.exchange = group.place = None
        return Lost(reason=reason)

    def _has_head(self) -> bool:
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), 2.0).close()
        except OSError:
            return False
        return True

    def _look(self) -> None:
        """Looks for the head and the hosts; logs which have joined and left.

        Raises:
            ProcessError: The head is gone for too long; raised once.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS or self._is_lost:
            return
        self._looked = now
        if not self._has_head():
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
            for node in self._ray.nodes()
            if node["Alive"]
        }
        for node in hosts.keys() - self._hosts.keys():
            logger.info("Ray: host %s is in the cluster", hosts[node])
        for node in self._hosts.keys() - hosts.keys():
            logger.warning("Ray: host %s has left the cluster", self._hosts[node])
        self._hosts = hosts

    def interrupt(self, group: int) -> None:
        """Lets a worker end; see `Workers.interrupt`."""
        self._groups[group].ends = True

    def kill(self, group: int) -> None:
        """Kills a worker; see `Workers.kill`."""
        if (actor := self._groups[group].actor) is not None:
            self._ray.kill(actor)

    def close(self) -> None:
        """Ends all actors, and their processes with them."""
        for number, group in enumerate(self._groups):
            if group.actor is not None:
                self._lose(number, "")


@contextlib.contextmanager
def joined_cluster(
    address: str, command: Sequence[str], meshes: Sequence[MeshSizes]
) -> Iterator[RayWorkers]:
    """Joins a Ray cluster that runs, as its driver.

    Args:
        address: Address of its head, or `auto`.
        command: Program and arguments of every worker.
        meshes: Mesh of each group.

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
            "wherever ray start and jaxlora run; docs/howto/sweep.md shows how."
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
        yield RayWorkers(command, meshes)
    finally:
        ray.shutdown()

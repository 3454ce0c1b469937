"""Starts the processes of workers on this host, each with the devices of its group."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence

from jaxlora.common.atomic import make_folder, wrap_os_errors
from jaxlora.device_check import named_gpus
from jaxlora.errors import ConfigError
from jaxlora.plan.memory.gpu_share import query_gpus
from jaxlora.sharding.mesh_sizes import MeshSizes

LOG_FILE = "worker.log"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_TAIL_BYTES = 2000
_FEWEST_CORES = 4  # of a device; a process has threads that must not wait for others


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A worker has ended, for whatever reason; nothing more comes from it.

    Attributes:
        reason: Text that says how it ended, as far as that is known.
        is_final: Whether it would end in the same way again.
    """

    reason: str
    is_final: bool = False


class Process:
    """The process of a worker, on this host."""

    def __init__(
        self,
        command: Sequence[str],
        folder: pathlib.Path,
        environ: Mapping[str, str],
        door: bytes,
        cores: Collection[int] | None = None,
    ):
        """Starts the process.

        It is in a session of its own, so that Ctrl-C reaches the driver alone.

        Args:
            command: The program and its arguments.
            folder: Folder for its log, which is made.
            environ: Environment variables besides those of this process.
            door: Goes to its standard input, as others cannot see that.
            cores: Processor cores that it may use; None: those of this process.
        """
        self._folder = folder
        with wrap_os_errors(folder):
            make_folder(folder)
            with open(folder / LOG_FILE, "ab") as log, _running_on(cores):
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environ},
                    start_new_session=True,
                )
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError), pipe:
            pipe.write(door)

    def ending(self, seconds: float | None) -> Lost | None:
        """Returns how it has ended; None if it has not.

        Args:
            seconds: Time to wait for its end; None: until it comes.
        """
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        how = (
            f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
        )
        tail = _log_tail(self._folder / LOG_FILE)
        return Lost(reason=f"process {self._process.pid} {how}{tail}")

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()


@contextlib.contextmanager
def _running_on(cores: Collection[int] | None) -> Iterator[None]:
    """Runs this thread, and so the processes that it starts, on some cores only."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _log_tail(path: pathlib.Path) -> str:
    """Returns the last line of a worker's log, and where the others are."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; {path} ends with: {last}" if last else ""


class Launcher:
    """Starts processes on this host.

    Attributes:
        host: Address at which the processes reach this one.
    """

    host = "127.0.0.1"

    def __init__(
        self,
        command: Sequence[str],
        environs: Sequence[Mapping[str, str]],
        cores: Sequence[Collection[int] | None],
    ):
        """Makes the object; no process runs.

        Args:
            command: The program and its arguments.
            environs: Environment variables of each group; see `divide`.
            cores: Processor cores of each group; see `divide_cores`.
        """
        self._command, self._environs = tuple(command), environs
        self._cores = cores

    def start(self, group: int, folder: pathlib.Path, door: bytes) -> Process | None:
        """Starts a process, unless its devices are not there now; then it is None.

        Args:
            group: Number of the group.
            folder: Folder of its run, which is made, with the worker's log.
            door: Goes to its standard input; it says how to connect to the driver.
        """
        environ, cores = self._environs[group], self._cores[group]
        return Process(self._command, folder, environ, door, cores)

    def look(self) -> None:
        """Looks whether processes can be started and go on, in every round.

        Raises:
            ProcessError: They cannot; raised once.
        """


def divide(
    meshes: Sequence[MeshSizes], environ: Mapping[str, str] = os.environ
) -> list[dict[str, str]]:
    """Returns the environment variables that give each group its devices.

    Without GPUs, or if JAX_PLATFORMS is `cpu`, each group has as many simulated devices
    as it needs.

    Raises:
        ConfigError: There are fewer GPUs than the groups need.
    """
    sizes = [mesh.num_devices for mesh in meshes]
    gpus = None if environ.get("JAX_PLATFORMS") == "cpu" else _gpus(environ)
    if gpus is None:
        return [{"JAX_NUM_CPU_DEVICES": str(size)} for size in sizes]
    if sum(sizes) > len(gpus):
        raise ConfigError(
            f"sweep.groups needs {' + '.join(map(str, sizes))} = {sum(sizes)} GPUs, "
            f"and this host has {len(gpus)}: {', '.join(gpus) or 'none is visible'}. "
            f"Give fewer or smaller groups, or more GPUs in {VISIBLE}."
        )
    given, first = [], 0
    for size in sizes:
        given.append({VISIBLE: ",".join(gpus[first : first + size])})
        first += size
    return given


def divide_cores(
    meshes: Sequence[MeshSizes], cores: Collection[int] | None = None
) -> list[Collection[int] | None]:
    """Returns the processor cores of each group, in proportion to its devices.

    A group that packs samples or starts jobs would otherwise wait for cores while its
    neighbor compiles, and take longer than predicted. Cores with neighboring numbers
    share caches and memory. Where they are few, each group may use all of them.

    Args:
        meshes: The mesh of each group.
        cores: The cores to divide; None: those of this process.
    """
    own = sorted(os.sched_getaffinity(0) if cores is None else cores)
    ends = list(itertools.accumulate(mesh.num_devices for mesh in meshes))
    if len(meshes) == 1 or len(own) < _FEWEST_CORES * ends[-1]:
        return [None] * len(meshes)
    borders = [len(own) * end // ends[-1] for end in (0, *ends)]
    return [own[first:end] for first, end in itertools.pairwise(borders)]


def _gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Returns the GPUs that this process may use; None if there are none at all."""
    visible = environ.get(VISIBLE)
    if visible is not None:
        return named_gpus(visible)
    found = query_gpus()
    return None if found is None else [gpu.uuid for gpu in found]

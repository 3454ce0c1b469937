"""The devices of this host, divided among the groups of a sweep; and its load."""

import os
import pathlib
from collections.abc import Mapping, Sequence

from jaxlora.errors import ConfigError
from jaxlora.plan.memory.gpu_share import query_gpus
from jaxlora.sharding.mesh_sizes import MeshSizes

VISIBLE = "CUDA_VISIBLE_DEVICES"
_MEMINFO = pathlib.Path("/proc/meminfo")


def divide(
    meshes: Sequence[MeshSizes], environ: Mapping[str, str] = os.environ
) -> list[dict[str, str]]:
    """Returns the environment variables that give each group its devices.

    Without GPUs, or if JAX_PLATFORMS is `cpu`, each group has as many simulated devices
    as it needs.

    Args:
        meshes: Mesh of each group.
        environ: Environment variables of this process.

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


def _gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Returns the GPUs that this process may use; None if there are none at all."""
    visible = environ.get(VISIBLE)
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    found = query_gpus()
    return None if found is None else [gpu.uuid for gpu in found]


def host_resources() -> dict[str, float]:
    """Returns the load per processor, and the share of the memory that is in use."""
    found = {"load": os.getloadavg()[0] / (os.cpu_count() or 1)}
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return found
    parts = (line.partition(":") for line in lines)
    kib = {name: int(rest.split()[0]) for name, _, rest in parts}
    if {"MemTotal", "MemAvailable"} <= kib.keys():
        found["memory"] = 1 - kib["MemAvailable"] / kib["MemTotal"]
    return found

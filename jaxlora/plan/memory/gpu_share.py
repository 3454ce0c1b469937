"""Chooses the share of a GPU's memory that JAX takes; this comes before JAX starts.

JAX reads its settings from environment variables when it opens the GPU, and takes 75 %
by default. The command line takes more of a GPU that no other process uses.
"""

import csv
import dataclasses
import logging
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from jaxlora.device_check import named_gpus

logger = logging.getLogger(__name__)

SHARE = 0.92  # the rest is for the driver, cuDNN, NCCL and loaded programs
# Gathered weights are in memory that NCCL maps, which is also part of the rest: of
# Llama-3.1-70B two layers and the head, 5.5 GB.
GATHERING_SHARE = 0.85
FRACTION = "XLA_CLIENT_MEM_FRACTION"
FRACTIONS = (FRACTION, "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the second is deprecated
_OTHERS = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")

_QUERY = "index,uuid,name,driver_version,memory.total,memory.used"
_SECONDS = 20.0  # without its daemon, the driver starts anew for each query
_IDLE_MIB = 64  # a driver without processes uses a few MiB; a process, over 100


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """The use of one GPU, as `nvidia-smi` reports it.

    Attributes:
        index: Number of the GPU, by its position on the bus.
        uuid: Its identifier, which starts with `GPU-`.
        name: Name of its kind.
        driver: Version of its driver.
        total_mib: Its memory in MiB; None: it is not reported.
        used_mib: Memory in use by all processes, in MiB; None: it is not reported.
    """

    index: int
    uuid: str
    name: str
    driver: str
    total_mib: int | None
    used_mib: int | None


def take_free_gpus(
    local_ids: Sequence[int] | None = None,
    environ: MutableMapping[str, str] = os.environ,
    *,
    gathers: bool = False,
    query: Callable[[], Sequence[GpuUse] | None] | None = None,
) -> None:
    """Lets JAX take most of the GPUs, if no other process has memory there.

    Nothing changes if the user has set a fraction, an allocator or preallocation, or if
    JAX runs on another platform. It logs what was decided.

    Args:
        local_ids: GPUs among the visible ones that this process uses; None: all.
        environ: Environment variables, which are changed.
        gathers: Whether the run may gather weights, as with FSDP.
        query: Returns what `query_gpus` has found; None: it is called here.
    """
    choice = choose_share(local_ids, environ, gathers=gathers, query=query)
    if choice is None:
        return
    share, text = choice
    if share is not None:
        environ[FRACTION] = str(share)
    logger.info("GPU memory: %s", text)


def choose_share(
    local_ids: Sequence[int] | None,
    environ: Mapping[str, str],
    *,
    gathers: bool = False,
    query: Callable[[], Sequence[GpuUse] | None] | None = None,
) -> tuple[float | None, str] | None:
    """Decides what `take_free_gpus` does.

    Returns:
        The share, or None if it is what JAX takes, and why; None: there is no GPU.
    """
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return None
    for name in (*FRACTIONS, *_OTHERS):
        if value := environ.get(name):
            return None, f"as set by {name}={value}"
    if shutil.which("nvidia-smi") is None:
        if not pathlib.Path("/proc/driver/nvidia").exists():
            return None
        return _default("nvidia-smi, which knows their use, is not installed")
    gpus = query_gpus() if query is None else query()
    if gpus is None:
        return _default("nvidia-smi fails")
    ours = _ours(gpus, environ, local_ids)
    if ours is None:
        return _default("CUDA_VISIBLE_DEVICES names a part of a GPU")
    for gpu in ours:
        if gpu.used_mib is None or gpu.used_mib > _IDLE_MIB:
            used = "an unknown part" if gpu.used_mib is None else f"{gpu.used_mib} MiB"
            return _default(f"{used} of GPU {gpu.index} is in use already")
    if not ours:
        return None
    share = GATHERING_SHARE if gathers else SHARE
    rest = ", and gathered weights take a part of the rest" if gathers else ""
    return share, (
        f"JAX takes {share:.0%}, as no other process uses it{rest} ({FRACTION}={share})"
    )


def _default(reason: str) -> tuple[None, str]:
    text = f"JAX takes its default, 75% of each GPU, as {reason}; {FRACTION} changes it"
    return None, text


def visible_devices(
    environ: Mapping[str, str] = os.environ,
    query: Callable[[], Sequence[GpuUse] | None] | None = None,
) -> list[str]:
    """Returns the visible GPUs, each as CUDA_VISIBLE_DEVICES may name it alone.

    Args:
        environ: Environment variables.
        query: Returns what `query_gpus` has found; None: it is called here.
    """
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return named_gpus(visible)
    if shutil.which("nvidia-smi") is None:
        return []
    gpus = query_gpus() if query is None else query()
    return [gpu.uuid for gpu in gpus or ()]


def query_gpus() -> tuple[GpuUse, ...] | None:
    """Returns the use of all GPUs of the machine; None if `nvidia-smi` fails."""

    def number(text: str) -> int | None:
        return int(text) if text.isdecimal() else None

    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
        return tuple(
            GpuUse(
                index=int(index),
                uuid=uuid,
                name=name,
                driver=driver,
                total_mib=number(total),
                used_mib=number(used),
            )
            for index, uuid, name, driver, total, used in rows
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _ours(
    gpus: Sequence[GpuUse],
    environ: Mapping[str, str],
    local_ids: Sequence[int] | None,
) -> Sequence[GpuUse] | None:
    """Returns the GPUs that JAX will open; None if that cannot be known.

    If the numbers may mean other GPUs to CUDA, these are all GPUs of the machine: CUDA
    puts the fastest first, and `nvidia-smi` goes by the position on the bus.
    """
    is_by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    has_same_numbers = is_by_bus or len({gpu.name for gpu in gpus}) == 1
    found = list(gpus)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found = []
        for item in map(str.strip, visible.split(",")):
            if item.startswith("MIG"):
                return None
            if item.isdecimal() and not has_same_numbers:
                return gpus
            named = [
                gpu
                for gpu in gpus
                if item == str(gpu.index)
                or (item.startswith("GPU-") and gpu.uuid.startswith(item))
            ]
            if not named:
                break  # CUDA ignores what follows an invalid entry
            found += named
    if local_ids is None or not has_same_numbers:
        return found
    return [found[i] for i in local_ids if i < len(found)]

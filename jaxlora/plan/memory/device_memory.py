"""Memory of the device that a run may use."""

import dataclasses
import math
import os

import jax

from jaxlora.distributed import processes
from jaxlora.pallas_kernels.device import planned_device
from jaxlora.plan.memory.gpu_share import FRACTION, FRACTIONS, SHARE

_RESERVE = 0.05  # share of the memory that stays free for the allocator and others


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Device memory that a run may use.

    Attributes:
        num_bytes: Size, without the reserve and without memory in use by others.
        source: Describes how the size was determined.
        is_shared: Whether all devices have this memory together, as on a CPU.
    """

    num_bytes: int
    source: str
    is_shared: bool = False

    def share(self, num_devices: int) -> "DeviceMemory":
        """Returns the memory of each of the devices that a run uses."""
        if not self.is_shared or num_devices == 1:
            return self
        return DeviceMemory(
            num_bytes=self.num_bytes // num_devices,
            source=f"{self.source}, an equal share for each of {num_devices} devices",
        )


def device_memory(own_bytes: int) -> DeviceMemory | None:
    """Returns the first device's memory for a run; None if it is not reported.

    On a GPU this is the limit of JAX's allocator, less the other arrays of this
    process; not every allocator reports these. On a CPU, which reports nothing, it is
    the machine's memory, which its devices share.

    Args:
        own_bytes: Memory that the run holds on the device already.
    """
    if (planned := planned_device()) is not None:
        owner = f"the {planned.kind} memory that JAX is given"
        return _less_reserve(planned.memory_bytes, 0, owner)
    device = jax.local_devices()[0]
    stats, is_shared = device.memory_stats() or {}, False
    if "bytes_limit" in stats:
        limit = stats["bytes_limit"]
        others = max(0, stats["bytes_in_use"] - own_bytes)
        owner = f"the {device.device_kind} memory that JAX may use ({_share()})"
    elif device.platform == "cpu":
        limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        others, owner, is_shared = 0, "the machine's memory", True
    else:
        return None
    # All processes choose the same capacity, so the smallest memory counts.
    limit, others = min(
        processes.gather((limit, others)), key=lambda found: found[0] - found[1]
    )
    found = _less_reserve(limit, others, owner)
    return dataclasses.replace(found, is_shared=is_shared)


def _less_reserve(limit: int, others: int, owner: str) -> DeviceMemory:
    reserved = math.ceil(_RESERVE * limit)
    source = f"{format_bytes(limit)} of {owner}, less {_RESERVE:.0%} in reserve"
    if others:
        source += f" and {format_bytes(others)} of other arrays"
    return DeviceMemory(num_bytes=limit - reserved - others, source=source)


def _share() -> str:
    """Says which setting limits the memory of JAX."""
    for name in FRACTIONS:
        if value := os.environ.get(name):
            return f"{name}={value}"
    return f"75% by default; {FRACTION}={SHARE} gives more"


def measured_peak() -> int | None:
    """Returns the most bytes in use on a device since this process began.

    It is that of this process's fullest device. None: the devices report none, as CPUs.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    return max(peaks, default=None)


def format_bytes(num_bytes: float) -> str:
    """Formats a number of bytes with a unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= 0.1 * size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"

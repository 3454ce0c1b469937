"""A machine as the choice of a mesh sees it."""

import dataclasses

import jax

from jaxlora.costs.device_speed import DeviceSpeed, find_speed
from jaxlora.memory.device import DeviceMemory, device_memory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Devices of one kind.

    Attributes:
        num_devices: Number of devices.
        speed: Rates of each device.
        memory: Memory of each device; None: it is not known, and is not checked.
        num_processes: Number of processes that these devices belong to.
    """

    num_devices: int
    speed: DeviceSpeed
    memory: DeviceMemory | None
    num_processes: int = 1


def this_machine() -> Machine:
    """Describes the devices of this process, before a run has put anything there."""
    devices = jax.devices()
    return Machine(
        num_devices=len(devices),
        speed=find_speed(devices[0].device_kind),
        memory=device_memory(0, len(devices)),
        num_processes=jax.process_count(),
    )

"""Describes the hardware that a run is planned for."""

import dataclasses
import socket

import jax

from jaxlora.costs.device_speed import DeviceSpeed, find_speed
from jaxlora.costs.links import Links, make_links
from jaxlora.distributed import processes
from jaxlora.memory import device_memory as device_module
from jaxlora.memory.device_memory import DeviceMemory
from jaxlora.pallas_kernels import device


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Devices of one kind.

    Attributes:
        num_devices: Number of devices.
        speed: Rates of each device.
        memory: Memory of a device that a run uses alone; None: it is not known, and is
            not checked.
        num_processes: Number of processes that these devices belong to.
        num_hosts: Number of hosts that have them, each as many.
    """

    num_devices: int
    speed: DeviceSpeed
    memory: DeviceMemory | None
    num_processes: int = 1
    num_hosts: int = 1

    def memory_of(self, num_devices: int) -> DeviceMemory | None:
        """Returns the memory of each of the devices that a run uses."""
        return None if self.memory is None else self.memory.share(num_devices)

    def links(self, network_gbits: float | None) -> Links:
        """Returns the links between the devices.

        Args:
            network_gbits: See `make_links`.
        """
        devices_per_host = max(1, self.num_devices // self.num_hosts)
        return make_links(self.speed, devices_per_host, network_gbits)


def this_machine(own_bytes: int = 0) -> Machine:
    """Describes the devices of a run.

    They are those of its processes, or those that it is planned for; a process on each
    machine is then assumed.

    Args:
        own_bytes: Memory that the run holds already on the first device.
    """
    planned = device.planned_device()
    num_devices = device.num_devices()
    return Machine(
        num_devices=num_devices,
        speed=find_speed(device.device_kind()),
        memory=device_module.device_memory(own_bytes),
        num_processes=jax.process_count() if planned is None else planned.num_hosts,
        num_hosts=(
            len(set(processes.gather(socket.gethostname())))
            if planned is None
            else planned.num_hosts
        ),
    )

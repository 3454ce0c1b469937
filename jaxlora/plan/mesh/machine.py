"""Describes the hardware that a run is planned for."""

import dataclasses
import socket

import jax

from jaxlora.costs import device_profile
from jaxlora.costs.device_profile import Profile, find_profile
from jaxlora.costs.gpus import DeviceSpeed, find_speed
from jaxlora.distributed import processes
from jaxlora.models.spec import DecoderSpec
from jaxlora.pallas_kernels import device
from jaxlora.plan.memory import device_memory as device_module
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.plan.mesh.predict import Rates


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
        profiles: What `jaxlora profile` has measured on devices of this kind.
    """

    num_devices: int
    speed: DeviceSpeed
    memory: DeviceMemory | None
    num_processes: int = 1
    num_hosts: int = 1
    profiles: tuple[Profile, ...] = ()

    def memory_of(self, num_devices: int) -> DeviceMemory | None:
        """Returns the memory of each of the devices that a run uses."""
        return None if self.memory is None else self.memory.share(num_devices)

    def rates(self, spec: DecoderSpec, network_gbits: float | None) -> Rates:
        """Returns what the time of a run follows from.

        Args:
            spec: The decoder.
            network_gbits: See `Rates.of`.
        """
        profile, speed = None, self.speed
        if self.profiles:
            profile, _ = find_profile(self.profiles, spec)
        if profile is not None and profile.link is not None:
            speed = speed.with_link(profile.link.bytes_per_second)
        devices_per_host = max(1, self.num_devices // self.num_hosts)
        return Rates.of(speed, devices_per_host, network_gbits, profile)


def this_machine(own_bytes: int = 0) -> Machine:
    """Describes the devices of a run.

    They are those of its processes, or those that it is planned for; a process on each
    machine is then assumed.

    Args:
        own_bytes: Memory that the run holds already on the first device.
    """
    planned = device.planned_device()
    num_devices, kind = device.num_devices(), device.device_kind()
    # The caches of several machines may differ.
    text = processes.from_first(lambda: device_profile.read_text(kind))
    return Machine(
        num_devices=num_devices,
        speed=find_speed(kind),
        memory=device_module.device_memory(own_bytes),
        num_processes=jax.process_count() if planned is None else planned.num_hosts,
        num_hosts=(
            len(set(processes.gather(socket.gethostname())))
            if planned is None
            else planned.num_hosts
        ),
        profiles=device_profile.parse(text, kind),
    )

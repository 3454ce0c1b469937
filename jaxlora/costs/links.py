"""The time of exchanges between devices, inside a host and between hosts."""

import dataclasses
import math

from jaxlora.costs.device_speed import DeviceSpeed

_NETWORK_SHARE = 0.75  # as between the GPUs of a host; not measured

# Bytes per second that a device has to other hosts, by JAX's `device_kind`.
_NETWORK_BYTES = {
    # DGX H100 and H200 data sheets: eight ports of InfiniBand NDR (400 Gb/s), one for
    # each GPU.
    "NVIDIA H200": 50e9,
    "NVIDIA H100 80GB HBM3": 50e9,
    # DGX A100 data sheet: eight ports of InfiniBand HDR (200 Gb/s).
    "NVIDIA A100-SXM4": 25e9,
}
# A port of 100 Gb/s that four GPUs share, as few hosts with PCIe have more.
_OTHER_NETWORK_BYTES = 100e9 / 8 / 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """The links between devices, which are numbered host by host.

    Attributes:
        speed: Rates of each device.
        devices_per_host: Number of devices of each host.
        network_bytes: Bytes per second, in each direction, between a host and all
            others.
    """

    speed: DeviceSpeed
    devices_per_host: int
    network_bytes: float

    def seconds(self, num_bytes: float, num_devices: int) -> float:
        """Estimates the time in which each of a group of neighbors receives data.

        Between hosts, what a device receives comes in through the network of its host
        once, in rings that share it, as in NCCL.

        Args:
            num_bytes: Bytes that each device receives.
            num_devices: Devices of the group; groups follow each other.
        """
        inside = self.speed.transfer_seconds(num_bytes)
        if self.devices_per_host % num_devices == 0:
            return inside
        return max(inside, num_bytes / (_NETWORK_SHARE * self.network_bytes))


def make_links(
    speed: DeviceSpeed, devices_per_host: int, network_gbits: float | None = None
) -> Links:
    """Describes the links of a machine.

    Args:
        speed: Rates of each device. If they are not known, transfers take no time.
        devices_per_host: Number of devices of each host.
        network_gbits: Gigabits per second between a host and all others; None: by the
            data sheet of the machine that the device is usually sold in.
    """
    if math.isinf(speed.link_bytes):
        rate = math.inf
    elif network_gbits is not None:
        rate = network_gbits * 1e9 / 8
    else:
        kinds = (kind for kind in _NETWORK_BYTES if speed.name.startswith(kind))
        each = _NETWORK_BYTES.get(next(kinds, ""), _OTHER_NETWORK_BYTES)
        rate = each * devices_per_host
    return Links(speed=speed, devices_per_host=devices_per_host, network_bytes=rate)

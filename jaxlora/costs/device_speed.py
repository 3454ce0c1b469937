"""Peak rates of known devices, from which the time of a pass is estimated."""

import dataclasses
import math

from jaxlora.costs.work import Work

# Shares of the peak rates that are reached. On an H200, these predict 52 µs per token
# for Llama-3.1-8B; 51 µs were measured without adapters and 54 with four of them.
_COMPUTE_SHARE = 0.65
_LINK_SHARE = 0.75  # 345 to 363 of 450 GB/s were measured between two H200s
_WEIGHT_TOKENS = 128.0  # of an unknown device; those below have 97 to 273


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeed:
    """Peak rates of a kind of device.

    Attributes:
        name: Name of the device, at the start of JAX's `device_kind`.
        flops: Dense bfloat16 operations with float32 sums, per second.
        memory_bytes: Bytes per second between the device and its memory.
        link_bytes: Bytes per second from one device to another in the same host.
    """

    name: str
    flops: float
    memory_bytes: float
    link_bytes: float

    @property
    def weight_tokens(self) -> float:
        """Tokens whose products take as long as reading bfloat16 weights once."""
        if math.isinf(self.memory_bytes):
            return _WEIGHT_TOKENS
        return _COMPUTE_SHARE * self.flops / self.memory_bytes

    def compute_seconds(self, work: Work) -> float:
        """Estimates the time of work on one device, in seconds."""
        return work.flops / (_COMPUTE_SHARE * self.flops) + (
            work.memory_bytes / self.memory_bytes
        )

    def transfer_seconds(self, num_bytes: float) -> float:
        """Estimates the time of a transfer between two devices, in seconds."""
        return num_bytes / (_LINK_SHARE * self.link_bytes)


# Rates without sparsity, which are half of those that the data sheets state with it.
DEVICE_SPEEDS = (
    # NVIDIA H200 Tensor Core GPU data sheet (SXM); NVLink has 900 GB/s in both
    # directions together.
    DeviceSpeed(
        name="NVIDIA H200", flops=989.5e12, memory_bytes=4.8e12, link_bytes=450e9
    ),
    # NVIDIA H100 Tensor Core GPU data sheet (SXM, whose device kind ends in HBM3).
    DeviceSpeed(
        name="NVIDIA H100 80GB HBM3",
        flops=989.5e12,
        memory_bytes=3.35e12,
        link_bytes=450e9,
    ),
    # NVIDIA A100 data sheet; NVLink has 600 GB/s in both directions together.
    DeviceSpeed(
        name="NVIDIA A100-SXM4-80GB",
        flops=312e12,
        memory_bytes=2.039e12,
        link_bytes=300e9,
    ),
    DeviceSpeed(
        name="NVIDIA A100-SXM4-40GB",
        flops=312e12,
        memory_bytes=1.555e12,
        link_bytes=300e9,
    ),
    # NVIDIA Ada GPU architecture white paper, appendix A: dense, with float32 sums.
    DeviceSpeed(
        name="NVIDIA GeForce RTX 4090",
        flops=165.2e12,
        memory_bytes=1.008e12,
        link_bytes=32e9,
    ),
    # NVIDIA L40S data sheet; PCIe 4.0 x16 has 64 GB/s in both directions together.
    DeviceSpeed(name="NVIDIA L40S", flops=362e12, memory_bytes=864e9, link_bytes=32e9),
)

# Time is counted in operations, and nothing but arithmetic takes time.
UNKNOWN_DEVICE = DeviceSpeed(
    name="unknown", flops=1.0, memory_bytes=math.inf, link_bytes=math.inf
)


def find_speed(device_kind: str) -> DeviceSpeed:
    """Returns the rates of a device by JAX's `device_kind`, or `UNKNOWN_DEVICE`."""
    for speed in DEVICE_SPEEDS:
        if device_kind.startswith(speed.name):
            return speed
    return UNKNOWN_DEVICE

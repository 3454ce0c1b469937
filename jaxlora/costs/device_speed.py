"""Rates of devices, from which the time of a pass is estimated."""

import dataclasses
import functools
import math

from jaxlora.costs.gpus import find_gpu
from jaxlora.costs.work import Work

# Shares of the peak rates that are reached. On an H200, these predict 52 µs per token
# for Llama-3.1-8B; 51 µs were measured without adapters and 54 with four of them.
_COMPUTE_SHARE = 0.65
# The same for products in fp8, with the quantizing of their inputs: of the linears of
# Llama-3.1-8B they took 204 ms on an H200, and 332 in bfloat16.
_FP8_SHARE = 0.53
_LINK_SHARE = 0.75  # 345 to 363 of 450 GB/s were measured between two H200s
# Both passes of a layer take this time, whatever its size: 30 layers of SmolLM2-135M's
# shapes took 8.7 ms of an H200 beside 2.2 microseconds a token.
_LAYER_SECONDS = 0.29e-3
# A token takes this time in attention of a layer, both passes, beside its operations.
# SmolLM2-135M's 30 layers took 1.1 microseconds a token on an H100, with 64 adapters;
# with this, H200s are predicted to take 2.15 (2.21 were measured), 8.6 for
# Llama-3.2-1B (8.45) and 51 for Llama-3.1-8B (51 to 54).
_ATTENTION_SECONDS = 25e-9
_WEIGHT_TOKENS = 128.0  # of an unknown device; those below have 97 to 273


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeed:
    """Peak rates of a kind of device.

    Attributes:
        name: Name of the device, at the start of JAX's `device_kind`.
        flops: Dense bfloat16 operations with float32 sums, per second.
        memory_bytes: Bytes per second between the device and its memory.
        link_bytes: Bytes per second from one device to another in the same host.
        fp8_flops: Dense fp8 operations per second; 0: they run in bfloat16.
        layer_seconds: Time of both passes of a layer, however few tokens there are.
        attention_seconds: Time of a token in attention of a layer, both passes, beside
            its operations.
    """

    name: str
    flops: float
    memory_bytes: float
    link_bytes: float
    fp8_flops: float = 0.0
    layer_seconds: float = 0.0
    attention_seconds: float = 0.0

    def sharing_heads(self, num_devices: int) -> "DeviceSpeed":
        """Returns the rates of a device that has a part of the heads of attention."""
        own = self.attention_seconds / num_devices
        return dataclasses.replace(self, attention_seconds=own)

    @property
    def weight_tokens(self) -> float:
        """Tokens whose products take as long as reading bfloat16 weights once."""
        if math.isinf(self.memory_bytes):
            return _WEIGHT_TOKENS
        return _COMPUTE_SHARE * self.flops / self.memory_bytes

    def compute_seconds(self, work: Work) -> float:
        """Estimates the time of work on one device, in seconds."""
        rate = _COMPUTE_SHARE * self.flops
        fp8_rate = _FP8_SHARE * self.fp8_flops or rate
        products = work.flops / rate + work.fp8_flops / fp8_rate
        return products + work.memory_bytes / self.memory_bytes

    def with_link(self, bytes_per_second: float) -> "DeviceSpeed":
        """Returns the rates with another one that transfers were measured to reach."""
        return dataclasses.replace(self, link_bytes=bytes_per_second / _LINK_SHARE)

    def transfer_seconds(self, num_bytes: float) -> float:
        """Estimates the time of a transfer between two devices, in seconds."""
        return num_bytes / (_LINK_SHARE * self.link_bytes)


# Time is counted in operations, and nothing but arithmetic takes time.
UNKNOWN_DEVICE = DeviceSpeed(
    name="unknown", flops=1.0, memory_bytes=math.inf, link_bytes=math.inf
)


@functools.cache
def find_speed(device_kind: str) -> DeviceSpeed:
    """Returns the rates of a device by JAX's `device_kind`, or `UNKNOWN_DEVICE`."""
    gpu = find_gpu(device_kind)
    if gpu is None:
        return UNKNOWN_DEVICE
    return DeviceSpeed(
        name=gpu.kind,
        flops=gpu.flops,
        memory_bytes=gpu.memory_bytes,
        link_bytes=gpu.link_bytes,
        fp8_flops=gpu.fp8_flops,
        layer_seconds=_LAYER_SECONDS,
        attention_seconds=_ATTENTION_SECONDS,
    )

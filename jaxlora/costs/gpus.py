"""The devices that are known, by their data sheets, and the time of work on them.

This is the only table of GPUs. Rates are without sparsity, which are half of those that
data sheets state with it.
"""

import dataclasses
import math
import re
from typing import Any

from jaxlora.costs.work import Work
from jaxlora.errors import ConfigError
from jaxlora.pallas_kernels.device import PlannedDevice

GPUS_OF_A_HOST = 8  # at most; more GPUs are in several machines
_MAX_GPUS = 64  # far beyond what has been tested

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
# A port of 100 Gb/s that four GPUs share, as few hosts with PCIe have more.
_NETWORK_BYTES = 100e9 / 8 / 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeed:
    """Peak rates of a kind of device.

    Attributes:
        kind: Start of JAX's `device_kind`.
        flops: Dense bfloat16 operations with float32 sums, per second.
        memory_bytes: Bytes per second between the device and its memory.
        link_bytes: Bytes per second from one device to another in the same host.
        network_bytes: Bytes per second that a device has to other hosts.
        fp8_flops: Dense fp8 operations per second; 0: they run in bfloat16.
        layer_seconds: Time of both passes of a layer, however few tokens there are.
        attention_seconds: Time of a token in attention of a layer, both passes, beside
            its operations.
    """

    kind: str
    flops: float
    memory_bytes: float
    link_bytes: float
    network_bytes: float = _NETWORK_BYTES
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
    kind="unknown", flops=1.0, memory_bytes=math.inf, link_bytes=math.inf
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gpu(DeviceSpeed):
    """A kind of GPU.

    Attributes:
        name: What a user calls it, as in `--gpu`.
        capability: Ten times the compute capability, which decides the kernels: 90 is
            Hopper, and others have the portable ones.
        num_sms: Number of multiprocessors.
        gigahertz: Boost clock of the multiprocessors.
        memory_gib: Memory that CUDA reports, which is less than its name says.
        link: What connects GPUs of a machine.
        is_measured: Whether jaxlora has been timed on it.
    """

    name: str
    capability: int
    num_sms: int
    gigahertz: float
    memory_gib: float
    link: str
    layer_seconds: float = _LAYER_SECONDS
    attention_seconds: float = _ATTENTION_SECONDS
    is_measured: bool = False


# What GPUs of a generation share. NVIDIA H200 and H100 Tensor Core GPU data sheets
# (SXM); NVLink has 900 GB/s in both directions together. DGX H100 and H200 data sheets:
# eight ports of InfiniBand NDR (400 Gb/s), one for each GPU.
_HOPPER: dict[str, Any] = dict(
    capability=90,
    num_sms=132,
    gigahertz=1.98,
    flops=989.5e12,
    fp8_flops=1979e12,
    link="NVLink",
    link_bytes=450e9,
    network_bytes=50e9,
    is_measured=True,
)
# NVIDIA A100 data sheet (SXM); NVLink has 600 GB/s in both directions together. DGX
# A100 data sheet: eight ports of InfiniBand HDR (200 Gb/s).
_A100: dict[str, Any] = dict(
    capability=80,
    num_sms=108,
    gigahertz=1.41,
    flops=312e12,
    link="NVLink",
    link_bytes=300e9,
    network_bytes=25e9,
)
# PCIe 4.0 x16 has 64 GB/s in both directions together.
_ADA: dict[str, Any] = dict(capability=89, gigahertz=2.52, link="PCIe", link_bytes=32e9)


def _gpu(name: str, kind: str, memory_gib: float, rate: float, **others: Any) -> Gpu:
    return Gpu(name=name, kind=kind, memory_gib=memory_gib, memory_bytes=rate, **others)


GPUS = (
    _gpu("h200", "NVIDIA H200", 139.8, 4.8e12, **_HOPPER),
    # The device kind of an H100 SXM ends in HBM3.
    _gpu("h100", "NVIDIA H100 80GB HBM3", 79.1, 3.35e12, **_HOPPER),
    _gpu("a100-80", "NVIDIA A100-SXM4-80GB", 79.1, 2.039e12, **_A100),
    _gpu("a100-40", "NVIDIA A100-SXM4-40GB", 39.4, 1.555e12, **_A100),
    # NVIDIA Ada GPU architecture white paper, appendix A.
    _gpu(
        *("rtx4090", "NVIDIA GeForce RTX 4090", 23.6, 1.008e12),
        **_ADA,
        num_sms=128,
        flops=165.2e12,
        fp8_flops=330.3e12,
    ),
    # NVIDIA L40S data sheet.
    _gpu(
        *("l40s", "NVIDIA L40S", 44.4, 864e9),
        **_ADA,
        num_sms=142,
        flops=362e12,
        fp8_flops=733e12,
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GpuMachine:
    """GPUs of one kind, in one machine, or in several of eight GPUs each."""

    gpu: Gpu
    count: int

    @property
    def num_hosts(self) -> int:
        """Number of machines."""
        return -(-self.count // GPUS_OF_A_HOST)

    def planned(self, share: float) -> PlannedDevice:
        """Returns the devices for `planned_for`.

        Args:
            share: Share of each GPU's memory that JAX is given.
        """
        return PlannedDevice(
            kind=self.gpu.kind,
            capability=self.gpu.capability,
            num_sms=self.gpu.num_sms,
            memory_bytes=int(share * self.gpu.memory_gib * 2**30),
            count=self.count,
            num_hosts=self.num_hosts,
        )

    def __str__(self) -> str:
        return self.gpu.name if self.count == 1 else f"{self.gpu.name}x{self.count}"


def find_gpu(device_kind: str) -> Gpu | None:
    """Returns a GPU by JAX's `device_kind`; None if it is not known."""
    return next((gpu for gpu in GPUS if device_kind.startswith(gpu.kind)), None)


def find_speed(device_kind: str) -> DeviceSpeed:
    """Returns the rates of a device by JAX's `device_kind`, or `UNKNOWN_DEVICE`."""
    return find_gpu(device_kind) or UNKNOWN_DEVICE


def parse_machine(text: str) -> GpuMachine:
    """Reads the name of a GPU and how many there are, such as `h100` or `h100x4`.

    Raises:
        ConfigError: The GPU is not known, or their number is none of a machine or of
            several whole ones.
    """
    known = {gpu.name: gpu for gpu in GPUS}
    names = "|".join(map(re.escape, known))
    found = re.fullmatch(f"({names})(?:x([0-9]{{1,6}}))?", text.strip().lower())
    if found is None:
        raise ConfigError(
            f"--gpu {text!r} is no known GPU. Give one of {', '.join(sorted(known))}, "
            "and for several of them their number, as in h100x4."
        )
    count = 1 if found[2] is None else int(found[2])
    is_whole = count <= GPUS_OF_A_HOST or count % GPUS_OF_A_HOST == 0
    if not (1 <= count <= _MAX_GPUS and is_whole):
        raise ConfigError(
            f"--gpu {text!r}: a machine has 1 to {GPUS_OF_A_HOST} GPUs, and several "
            f"machines have {GPUS_OF_A_HOST} each, up to {_MAX_GPUS} in all. Give such "
            "a number, as in h100x4 or h100x16."
        )
    return GpuMachine(gpu=known[found[1]], count=count)

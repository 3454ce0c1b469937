"""The GPUs that are known, by their data sheets.

This is the only table of GPUs. Rates are without sparsity, which are half of those that
data sheets state with it.
"""

import dataclasses
import re
from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.pallas_kernels.device import PlannedDevice

GPUS_OF_A_HOST = 8  # at most; more GPUs are in several machines
_MAX_GPUS = 64  # far beyond what has been tested


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: What a user calls it, as in `--gpu`.
        kind: Start of JAX's `device_kind`.
        capability: Ten times the compute capability, which decides the kernels: 90 is
            Hopper, and others have the portable ones.
        num_sms: Number of multiprocessors.
        gigahertz: Boost clock of the multiprocessors.
        memory_gib: Memory that CUDA reports, which is less than its name says.
        memory_bytes: Bytes per second between the multiprocessors and the memory.
        flops: Dense bfloat16 operations with float32 sums, per second.
        fp8_flops: The same in fp8; 0: there are none.
        link: What connects GPUs of a machine.
        link_bytes: Bytes per second from one GPU to another in the same machine.
        is_measured: Whether jaxlora has been timed on it.
    """

    name: str
    kind: str
    capability: int
    num_sms: int
    gigahertz: float
    memory_gib: float
    memory_bytes: float
    flops: float
    fp8_flops: float
    link: str
    link_bytes: float
    is_measured: bool = False


# What GPUs of a generation share. NVIDIA H200 and H100 Tensor Core GPU data sheets
# (SXM); NVLink has 900 GB/s in both directions together.
_HOPPER: dict[str, Any] = dict(
    capability=90,
    num_sms=132,
    gigahertz=1.98,
    flops=989.5e12,
    fp8_flops=1979e12,
    link="NVLink",
    link_bytes=450e9,
    is_measured=True,
)
# NVIDIA A100 data sheet (SXM); NVLink has 600 GB/s in both directions together.
_A100: dict[str, Any] = dict(
    capability=80,
    num_sms=108,
    gigahertz=1.41,
    flops=312e12,
    fp8_flops=0.0,
    link="NVLink",
    link_bytes=300e9,
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

"""Rates of a device from which the time of kernels is predicted."""

import dataclasses
import functools
from typing import Any

import jax

from jaxlora.costs.gpus import UNKNOWN_DEVICE, DeviceSpeed, find_gpu

# A tile of a large matrix product, on one multiprocessor.
TILE_ROWS, TILE_COLUMNS = 128, 256
# Share of the data sheet's 64 integer operations for each multiprocessor and cycle.
_ISSUE_SHARE = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelRates:
    """A device as the cost model sees it.

    Attributes:
        speed: Peak rates, from the data sheet.
        num_sms: Number of multiprocessors, from the data sheet.
        vector_operations: Peak rate of element-wise operations, per second, from the
            data sheet: 128 for each multiprocessor and cycle.
        integer_operations: Rate of the integer operations of random bits, per second.
        matmul_share: Share of the peak that a product reaches while all
            multiprocessors have a tile.
        memory_share: Share of the peak that loops over large tensors reach.
        thin_share: The same for matrix products with a narrow side, through cuBLAS.
        launch_seconds: Shortest time that a kernel takes.
    """

    speed: DeviceSpeed
    num_sms: int
    vector_operations: float
    integer_operations: float
    matmul_share: float = 0.8
    memory_share: float = 0.8
    thin_share: float = 0.7
    launch_seconds: float = 2e-6

    @property
    def name(self) -> str:
        """Name of the device."""
        return self.speed.kind

    @property
    def title(self) -> str:
        """The device whose times are predicted, in words."""
        if self.name == UNKNOWN_DEVICE.kind:
            return "a typical GPU, as the rates of this device are unknown"
        return self.name

    @property
    def memory_bytes(self) -> float:
        """Bytes per second that loops over large tensors reach."""
        return self.memory_share * self.speed.memory_bytes

    @property
    def matmul_flops(self) -> float:
        """Operations per second that large matrix products reach."""
        return self.matmul_share * self.speed.flops

    def matmul_seconds(self, sizes: tuple[int, int, int, int]) -> float:
        """Returns the time of a product's arithmetic, in seconds.

        Tiles are computed in rounds of one per multiprocessor. The last round takes as
        long as the others. On an H200, 8 rounds of 4,096 features take 343 us, 28
        rounds 1,206 us, and 8 rounds of 14,336 features 1,182 us
        (docs/measured/kernels.csv).

        Args:
            sizes: Batches, rows, columns, and the contracted length.
        """
        batches, rows, columns, inner = sizes
        tiles = batches * -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)
        rounds = -(-tiles // self.num_sms)
        flops = 2.0 * TILE_ROWS * TILE_COLUMNS * inner * self.num_sms
        # Small products take smaller tiles.
        least = 2.0 * batches * rows * columns * inner / self.matmul_flops
        if tiles < self.num_sms:
            return least
        return max(least, rounds * flops / self.matmul_flops)


def _rates(num_sms: int, gigahertz: float) -> dict[str, Any]:
    cycles = num_sms * gigahertz * 1e9
    return {
        "num_sms": num_sms,
        "vector_operations": 128 * cycles,
        "integer_operations": _ISSUE_SHARE * 64 * cycles,
    }


# Shares that differ from the defaults. An H200's share for products is fitted to the
# frozen layers in docs/measured/kernels.csv, and its share for loops is the 4 TB/s at
# which they run. The defaults, among them that of thin products, are estimates.
_SHARES: dict[str, dict[str, Any]] = {
    "h200": {"matmul_share": 0.835, "memory_share": 0.83},
    "h100": {"matmul_share": 0.75},
}
# A device without a data sheet here has the proportions of a GPU of about 2020.
_UNKNOWN_SPEED = dataclasses.replace(
    UNKNOWN_DEVICE, flops=300e12, memory_bytes=2e12, link_bytes=100e9
)


@functools.cache
def describe_device(kind: str | None = None) -> KernelRates:
    """Returns the rates of a device.

    Args:
        kind: JAX's `device_kind`, such as `NVIDIA H200`; None: the present device. An
            unknown kind gets the rates of a typical GPU, and the name `unknown`.
    """
    if kind is None:
        kind = jax.devices()[0].device_kind
    gpu = find_gpu(kind)
    if gpu is None:
        return KernelRates(speed=_UNKNOWN_SPEED, **_rates(108, 1.41))
    return KernelRates(
        speed=gpu,
        **_rates(gpu.num_sms, gpu.gigahertz),
        **_SHARES.get(gpu.name, {}),
    )

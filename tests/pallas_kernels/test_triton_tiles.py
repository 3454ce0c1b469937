"""Every tile in the table compiles for its device without spills, and fits into it."""

import jax
import pytest

from jaxlora.pallas_kernels.triton import tiles
from jaxlora.pallas_kernels.triton.compile import (
    KernelFacts,
    kernel_facts,
    shared_memory_bytes,
)
from jaxlora.pallas_kernels.triton.device import Target
from jaxlora.pallas_kernels.triton.dual import dual_kernel
from jaxlora.pallas_kernels.triton.outer import outer_kernel

X, F32, I32, U32 = "*bf16", "*fp32", "*i32", "*u32"
PARTS = [I32] * 4
POINTERS = {
    "outer": [X, X, I32, *PARTS, I32, U32, I32, U32, U32, I32, F32],
    "dual": [X, X, X, I32, *PARTS, I32, I32, F32, F32],
}
KERNELS = {"outer": outer_kernel, "dual": dual_kernel}
SIZES = {"T": 8192, "K": 4096, "N": 4096, "G": 4, "F": 4096, "MASKED": True}
ENTRIES = [
    (device, name)
    for device, entries in tiles.tile_table().items()
    for name in entries
    if name.split()[0] in KERNELS
]


@pytest.fixture(autouse=True)
def _cache(monkeypatch):
    """Compiled kernels are kept where the tests' programs are kept."""
    folder = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("TRITON_CACHE_DIR", f"{folder}/triton")


def compiled(kernel, tile, capability, **sizes) -> KernelFacts:
    constants = SIZES | tile.sizes | sizes
    constants["BR"] = min(constants["R"], tiles.CHUNK)
    return kernel_facts(
        KERNELS[kernel],
        POINTERS[kernel],
        constants,
        capability=capability,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@pytest.mark.parametrize(("device", "name"), ENTRIES)
def test_a_tile_fits_and_does_not_spill(device, name):
    kernel, _, ranks = name.partition(" ")
    capability = int(device.split(",")[0])
    tile = tiles.to_tile(tiles.tile_table()[device][name])
    for r in [int(ranks)] if ranks.isdigit() else [16, 64]:
        for odd in ({}, {"K": 4104, "N": 4104}):
            facts = compiled(kernel, tile, capability, R=r, **odd)
            assert facts.local_bytes == 0, (r, odd, facts)
            assert facts.shared_bytes <= shared_memory_bytes(capability), (r, facts)


def test_a_tile_that_spills_is_found():
    tile = tiles.Tile(sizes={"BN": 512}, num_warps=4, num_stages=2)
    assert compiled("dual", tile, 80, R=64).local_bytes > 0


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 90, 100, 103, 120, 121])
def test_every_device_has_tiles_that_fit(capability):
    target = Target(capability=capability, num_sms=100)
    for kernel in ("expand", "shrink", "outer", "dual"):
        for rank in (16, 32, 64, 256):
            tile = tiles.tile_for(kernel, target, rank=rank, shape=(8192, 4096, 4096))
            assert tile.num_warps in (4, 8)

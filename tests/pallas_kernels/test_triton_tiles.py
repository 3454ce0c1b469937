"""Every tile in the table compiles for its device without spills, and fits into it."""

import re

import jax
import pytest

from jaxlora.pallas_kernels.triton import launch as tiles
from jaxlora.pallas_kernels.triton.arguments import GIVEN, HASHED
from jaxlora.pallas_kernels.triton.dual import dual_kernel
from jaxlora.pallas_kernels.triton.expand import expand_kernel
from jaxlora.pallas_kernels.triton.outer import outer_kernel
from jaxlora.pallas_kernels.triton.shrink import shrink_kernel
from jaxlora.pallas_kernels.triton.target import Target
from tests.pallas_kernels.triton_facts import (
    KernelFacts,
    kernel_facts,
    shared_memory_bytes,
)

KERNELS = {
    "expand": expand_kernel,
    "expand_2": expand_kernel,
    "expand_3": expand_kernel,
    "shrink": shrink_kernel,
    "outer": outer_kernel,
    "dual": dual_kernel,
}
# Types of the kernels' pointers, by name without the projection's number.
TYPES = (
    dict.fromkeys(["x", "w", "a", "b", "s", "dy", "y", "bias"], "*bf16")
    | dict.fromkeys(["factor", "db", "da"], "*fp32")
    | dict.fromkeys(["threshold", "token", "feature"], "*u32")
    | dict.fromkeys(["layer", "slot_of", "order", "index", "row", "place"], "*i32")
    | dict.fromkeys(["chunks", "num_chunks", "num_parts"], "*i32")
    | dict.fromkeys(["part_slot", "part_first", "part_blocks"], "*i32")
)
SIZES = {
    **{"T": 8192, "K": 4096, "K_0": 4096, "K_1": 1024, "K_2": 1024, "N": 4096, "P": 1},
    **{"G": 4, "F": 4096, "MASK": HASHED.value, "RANK_FIRST": False, "BIASED": False},
    **{"FG": 4, "BY_TILE": False},
}
ODD = {"K": 4104, "K_0": 4104, "N": 4104}  # not multiples of a tile
WIDE = {"K_0": 14336, "K_1": 14336}
HALF = {"T": 8256}  # an odd number of blocks: half of the last tile of 128 rows
Y = {"MASK": 0, "TRANSPOSED": False, "RANK_LAST": False}
DX = {"TRANSPOSED": True, "RANK_LAST": True}
BITS = {"MASK": GIVEN.value}
EXPERTS = {"G": 512, "BY_TILE": True}
# Ranks and sizes for which the tiles of a kernel are compiled.
CASES = {
    "expand": [
        (16, Y | ODD | {"BIASED": True}),
        (16, DX | HALF),
        (64, DX),
        (64, DX | BITS),
        (64, DX | EXPERTS),
    ],
    "expand_2": [
        (16, DX | WIDE | {"P": 2}),
        (16, DX | HALF | {"P": 2}),
        (16, DX | BITS | {"P": 2}),
    ],
    "expand_3": [(16, DX | {"P": 3})],
    "shrink": [(16, ODD | HALF), (64, HALF), (64, BITS | ODD)],
    "outer": [(16, HALF | {"P": 3}), (64, ODD | EXPERTS), (64, BITS | ODD)],
    "dual": [(16, HALF), (32, ODD), (64, ODD)],
}
# The device for which each kernel is always compiled; the other tiles are of the grid.
ALWAYS = {"expand": "90", "shrink": "86"}
ENTRIES = [
    pytest.param(
        device, name, marks=() if ALWAYS.get(name) == device else pytest.mark.grid
    )
    for device, entries in tiles.tile_table().items()
    for name in entries
]


@pytest.fixture(autouse=True)
def _cache(monkeypatch):
    """Compiled kernels are kept where the tests' programs are kept."""
    folder = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("TRITON_CACHE_DIR", f"{folder}/triton")


def pointers_of(kernel):
    """The types of a kernel's pointers, which come before its constants."""
    for name in KERNELS[kernel].arg_names:
        base = re.sub(r"_[0-2]$", "", name)
        if name.isupper() or base.isupper():
            return
        # dual writes its sums of ds in float32; outer reads ds.
        is_sum = (kernel, base) == ("dual", "ds")
        yield "*fp32" if is_sum else (TYPES | {"ds": "*bf16"})[base]


def compiled(kernel, tile, capability, **sizes) -> KernelFacts:
    constants = SIZES | tile.sizes | sizes
    constants["BR"] = min(constants["R"], tiles.CHUNK)
    return kernel_facts(
        KERNELS[kernel],
        list(pointers_of(kernel)),
        constants,
        capability=capability,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@pytest.mark.parametrize(("device", "name"), ENTRIES)
def test_a_tile_fits_and_does_not_spill(device, name):
    kernel, *of = name.split()
    capability = int(device.split(",")[0])
    tile = tiles.to_tile(tiles.tile_table()[device][name])
    is_rank = len(of) == 1  # other entries are for one product, of any rank
    for r, sizes in CASES[kernel]:
        if is_rank and r != int(of[0]):
            continue
        facts = compiled(kernel, tile, capability, R=r, **sizes)
        assert facts.local_bytes == 0, (r, sizes, facts)
        assert facts.shared_bytes <= shared_memory_bytes(capability), (r, facts)


def test_a_tile_that_spills_is_found():
    tile = tiles.Tile(sizes={"BN": 512}, num_warps=4, num_stages=2)
    assert compiled("dual", tile, 80, R=64).local_bytes > 0


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 90, 100, 103, 120, 121])
def test_every_device_has_tiles_that_fit(capability):
    target = Target(capability=capability, num_sms=100)
    for kernel in KERNELS:
        for rank in (16, 32, 64, 256):
            tile = tiles.tile_for(kernel, target, rank=rank, shape=(8192, 4096, 4096))
            assert tile.num_warps in (4, 8)

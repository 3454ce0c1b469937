"""Tile choices: a table by device, and rules for devices and sizes that it lacks.

Tiles are never chosen by timing at run time, because results must not depend on it.
"""

import functools
import json
from importlib import resources

from jaxlora.pallas_kernels.triton.launch import Tile
from jaxlora.pallas_kernels.triton.target import Target

CHUNK = 64  # ranks of one step of the kernels' LoRA products
# The most parts of a slot's rows. It is the same for all layers, which can share the
# table of parts, and for all devices.
MAX_PARTS = 8
_TABLE = "tiles.json"
_SMALLEST = "120"  # its tiles fit the registers and shared memory of every device


@functools.cache
def tile_table() -> dict[str, dict[str, dict[str, int]]]:
    """Returns the table: device, then kernel and class of sizes, then the tile."""
    text = resources.files("jaxlora.pallas_kernels.triton").joinpath(_TABLE).read_text()
    return json.loads(text)


def measured_device(target: Target) -> str:
    """Returns the table's key of tiles that `python -m scripts.bench tune` measured."""
    return f"{target.capability}, {target.num_sms} multiprocessors"


def to_tile(entry: dict[str, int]) -> Tile:
    """Makes the tile of an entry of the table."""
    sizes = dict(entry)
    num_warps, num_stages = sizes.pop("num_warps"), sizes.pop("num_stages")
    return Tile(sizes=sizes, num_warps=num_warps, num_stages=num_stages)


def tile_for(
    kernel: str, target: Target, *, rank: int = CHUNK, shape: tuple[int, ...] = ()
) -> Tile:
    """Returns the tile with which a kernel is compiled.

    Args:
        kernel: `expand`, `expand_2` or `expand_3` (its sum over that many projections),
            `shrink`, `outer` or `dual`.
        target: The device for which it is compiled.
        rank: R; the kernels compute at most 64 ranks at once.
        shape: T, K and N of expand's product; ignored for the others.
    """
    classes = [f"{kernel} {min(rank, CHUNK)}", kernel]
    if kernel == "expand":
        classes = [f"expand {' '.join(map(str, shape))}", *classes]
    table = tile_table()
    for device in (measured_device(target), _known_capability(target.capability)):
        entries = table.get(device, {})
        for name in classes:
            if name in entries:
                return to_tile(entries[name])
    raise KeyError(f"{_TABLE} has no {kernel!r}")


def _known_capability(capability: int) -> str:
    """Returns the table's newest capability of the same generation, or the smallest."""
    known = [int(key) for key in tile_table() if key.isdigit()]
    same = [k for k in known if k <= capability and k // 10 == capability // 10]
    return str(max(same)) if same else _SMALLEST

"""Runs a Triton kernel as a JAX function: on a GPU, or in an interpreter in tests.

Tiles are chosen by a table of devices, with rules for devices and sizes that it lacks,
and never by timing at run time, because results must not depend on it.

A kernel's parameters are pointers to its inputs, pointers to its outputs, and constants
(`tl.constexpr`), in this order. It is decorated with `@triton.jit` and, below it, with
`@typing.no_type_check`, as the tests would otherwise wrap it.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import jax

from jaxlora.pallas_kernels import device
from jaxlora.pallas_kernels.triton.target import Target

# Whether a product and a sum may become one instruction. Triton's own default differs
# between versions, and results would change with it.
FP_FUSION = True

CHUNK = 64  # ranks of one step of the kernels' LoRA products
# The most parts of a slot's rows. It is the same for all layers, which can share the
# table of parts, and for all devices.
MAX_PARTS = 8
_TABLE = "tiles.json"
_SMALLEST = "120"  # its tiles fit the registers and shared memory of every device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """Compilation settings of a kernel.

    Attributes:
        sizes: Sizes of the tiles and the like, by the name of the kernel's constant.
        num_warps: Number of warps of a program.
        num_stages: Number of stages in which operands are loaded ahead.
    """

    sizes: dict[str, int]
    num_warps: int
    num_stages: int


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
    for key in (measured_device(target), _known_capability(target.capability)):
        entries = table.get(key, {})
        for name in classes:
            if name in entries:
                return to_tile(entries[name])
    raise KeyError(f"{_TABLE} has no {kernel!r}")


def _known_capability(capability: int) -> str:
    """Returns the table's newest capability of the same generation, or the smallest."""
    known = [int(key) for key in tile_table() if key.isdigit()]
    same = [k for k in known if k <= capability and k // 10 == capability // 10]
    return str(max(same)) if same else _SMALLEST


def launch(
    kernel: Any,
    inputs: Sequence[jax.Array],
    out_types: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    tile: Tile,
    target: Target,
    constants: dict[str, Any],
) -> list[jax.Array]:
    """Runs a kernel once for each element of a grid; returns its outputs.

    Args:
        kernel: A `triton.JITFunction`.
        inputs: The arrays that the kernel reads, in the order of its parameters.
        out_types: Shapes and dtypes of its outputs. What it does not write is
            undefined.
        grid: Number of programs along at most three axes.
        tile: Is compiled in; `sizes` are constants.
        target: What the kernel is compiled for, or its interpreter.
        constants: The other constants, by name.
    """
    values = constants | tile.sizes
    if target.interpreter is not None:
        run = _interpreter_call(kernel, out_types, grid, values, target.interpreter)
    else:
        run = _triton_call(kernel, out_types, grid, values, tile, target)
    return list(jax.custom_batching.sequential_vmap(run)(*inputs))


def _interpreter_call(
    kernel, out_types, grid, constants, interpreter: Callable
) -> Callable:
    def on_host(*inputs):
        return interpreter(kernel, inputs, out_types, grid, constants)

    return lambda *inputs: jax.pure_callback(on_host, list(out_types), *inputs)


def _triton_call(
    kernel, out_types, grid, constants, tile: Tile, target: Target
) -> Callable:
    def run(*inputs):
        return import_jax_triton().triton_call(
            *inputs,
            kernel=kernel,
            out_shape=list(out_types),
            grid=grid,
            name=kernel.__name__,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            compute_capability=target.capability,
            enable_fp_fusion=FP_FUSION,
            **constants,
        )

    return run


def import_jax_triton() -> Any:
    """Imports jax_triton, which needs a JAX with CUDA.

    Some versions clear TRITON_CACHE_DIR, which other users of Triton in this process
    need.
    """
    before = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton

    if before is not None:
        os.environ["TRITON_CACHE_DIR"] = before
    else:
        os.environ.pop("TRITON_CACHE_DIR", None)
    _assemble_for_present_gpu()
    return jax_triton


@functools.cache
def _assemble_for_present_gpu() -> None:
    from jax_triton import triton_lib as module

    triton_lib: Any = module
    triton_lib.triton_kernel_call_lib = _Assembler(triton_lib.triton_kernel_call_lib)


class _Assembler:
    """jaxlib's part of jax_triton, which assembles kernels for the present GPU."""

    def __init__(self, library: Any):
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def TritonKernel(self, *arguments: Any) -> Any:
        """Makes a kernel; the last argument is what its PTX is assembled for."""
        return self._library.TritonKernel(*arguments[:-1], _assembled(arguments[-1]))


def _assembled(capability: int) -> int:
    """Returns the capability for which code of a capability is assembled.

    A newer GPU runs PTX of an older capability, but not its machine code.
    """
    elsewhere = jax.sharding.get_abstract_mesh().abstract_device is not None
    if elsewhere or device.not_nvidia() is not None:
        return capability
    return max(capability, device.capability())

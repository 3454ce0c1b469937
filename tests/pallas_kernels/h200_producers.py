"""Compiles the producer kernels for an H200, without a GPU.

It is a program of its own, because XLA must be set up before JAX starts; see
`test_producers`.

usage: python -m tests.pallas_kernels.h200_producers OUT

OUT gets what the assembler says about the kernels' registers.
"""

import functools
import os
import sys

os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # Mosaic reads it when it is loaded

import jax
import jax.numpy as jnp

from jaxlora.modules.rowwise import NormRows, swiglu_gradient_rows, swiglu_rows
from jaxlora.pallas_kernels import RowArguments, kernel_settings
from jaxlora.pallas_kernels.mosaic import hopper as device
from jaxlora.pallas_kernels.mosaic.mask import HashMask
from jaxlora.pallas_kernels.mosaic.products import Side, produce
from jaxlora.pallas_kernels.operands import make_blocks
from tests import h200

T, NUM_SLOTS = 1024, 4


def kernel(given, a, slot, masks, *, function, sides):
    shape, rank = (len(a), NUM_SLOTS), a[0].shape[1]
    settings = kernel_settings(jnp.ones(shape), jnp.full(shape, rank), None)
    made = [
        Side(result=result, a=one, settings=own)
        for result, one, own in zip(sides, a, settings, strict=True)
    ]
    blocks = make_blocks(slot, NUM_SLOTS, T)
    return produce(function, RowArguments(*given), made, blocks, masks)


def arguments(numbers, k, rank, sides, *, has_masks):
    """Returns shapes and dtypes of the arguments of `kernel`."""
    num_tiles, num_rows, num_features = numbers
    of, words, num = jax.ShapeDtypeStruct, jnp.uint32, len(sides)
    mask = HashMask(
        of((num, T // 64, 2, 64), words),
        of((num, NUM_SLOTS, k), words),
        of((1,), jnp.int32),
    )
    return (
        (
            [of((T, k), jnp.bfloat16)] * num_tiles,
            [of((T,), jnp.float32)] * num_rows,
            [of((k,), jnp.bfloat16)] * num_features,
        ),
        [of((NUM_SLOTS, rank, k), jnp.bfloat16)] * num,
        of((T // 64,), jnp.int32),
        [mask] * num if has_masks else [],
    )


def gate_in_16_bits(gate, up):
    """A gate as authors write it, whose exp and tanh are those of bfloat16."""
    return (jax.nn.silu(gate) * jnp.tanh(up),)


# Function; number of tiles, of rows and of features; K; results of the side products,
# and whether they have masks.
CASES = (
    (NormRows(1e-5), (1, 1, 1), 4096, (0, 0, 0), True),
    (swiglu_rows, (2, 0, 0), 14336, (0,), True),
    (swiglu_gradient_rows, (3, 0, 0), 14336, (0, 1), False),
    (gate_in_16_bits, (2, 0, 0), 1024, (0,), True),
)


def main() -> None:
    """Compiles the kernels and writes the assembler's words."""
    device.num_sms = lambda: 132
    device.device_kind = lambda: "NVIDIA H200"
    h200.write_output_to(sys.argv[1])
    for function, numbers, k, sides, has_masks in CASES:
        for rank in (16, 64):
            case = arguments(numbers, k, rank, sides, has_masks=has_masks)
            run = functools.partial(kernel, function=function, sides=sides)
            jax.jit(run).lower(*h200.placed(case)).compile()


if __name__ == "__main__":
    main()

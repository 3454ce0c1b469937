"""Compiles the e4m3 expand kernels for an H200, without a GPU.

It is a program of its own, because XLA must be set up before JAX starts; see
`test_expand_fp8`.

usage: python -m tests.pallas_kernels.h200_expand_fp8 OUT

OUT gets what the assembler says about the kernels' registers.
"""

import os
import sys

os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # Mosaic reads it when it is loaded

import jax
import jax.numpy as jnp

from jaxlora.pallas_kernels import kernel_settings
from jaxlora.pallas_kernels.mosaic import hopper as device
from jaxlora.pallas_kernels.mosaic.mask import HashMask
from jaxlora.pallas_kernels.mosaic.products import expand_work, run_expand
from jaxlora.pallas_kernels.operands import Term, make_blocks
from tests import h200

T, NUM_SLOTS, RANK = 1024, 4, 16


def kernel(operands, scales, bias, slot, masks):
    shape = len(operands), NUM_SLOTS
    settings = kernel_settings(jnp.ones(shape), jnp.full(shape, RANK), None)
    given = operands, settings, masks or [None] * len(operands)
    terms = [Term(*one, own, mask) for one, own, mask in zip(*given, strict=True)]
    blocks, layer = make_blocks(slot, NUM_SLOTS, T), jnp.zeros(1, jnp.int32)
    work = expand_work(terms, layer, blocks, bias, transposed=True, scales=scales)
    return run_expand(work)


def arguments(features, n: int, *, is_y: bool, num_masks: int = 0):
    """Returns shapes and dtypes of the arguments of `kernel`."""
    of = jax.ShapeDtypeStruct
    e4m3, words = jnp.float8_e4m3fn, jnp.uint32
    operands = [
        (
            of((T, k), e4m3),
            of((1, n, k), e4m3),
            of((T, RANK), jnp.bfloat16),
            of((NUM_SLOTS, n, RANK), jnp.bfloat16),
        )
        for k in features
    ]
    mask = HashMask(
        of((num_masks, T // 64, 2, 64), words),
        of((num_masks, NUM_SLOTS, n), words),
        of((1,), jnp.int32),
    )
    return (
        operands,
        (of((T,), jnp.float32), of((n,), jnp.float32))[: 1 + is_y],
        of((n,), jnp.bfloat16) if is_y else None,
        of((T // 64,), jnp.int32),
        [mask] * num_masks,
    )


def main() -> None:
    """Compiles the kernels and writes the assembler's words."""
    device.num_sms = lambda: 132
    device.device_kind = lambda: "NVIDIA H200"
    cases = (
        arguments((4096,), 4096, is_y=True),
        arguments((4096, 1024, 1024), 4096, is_y=False),
        arguments((4096, 4096), 4096, is_y=False, num_masks=2),
    )
    h200.write_output_to(sys.argv[1])
    for case in cases:
        jax.jit(kernel).lower(*h200.placed(case)).compile()


if __name__ == "__main__":
    main()

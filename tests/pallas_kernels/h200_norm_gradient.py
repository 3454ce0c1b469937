"""Compiles the kernel of a norm's gradient for an H200, without a GPU.

It is a program of its own, because XLA must be set up before JAX starts; see
`test_norm_gradient`.

usage: python -m tests.pallas_kernels.h200_norm_gradient OUT HLO

OUT gets what the assembler says about the kernels' registers, and HLO the program of
the gradient of one norm.
"""

import os
import pathlib
import sys

os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # Mosaic reads it when it is loaded

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlora.modules.norm import RmsNorm
from jaxlora.pallas_kernels.mosaic import hopper as device
from jaxlora.pallas_kernels.mosaic.norm_gradient import norm_gradient
from tests import h200

CASES = (
    *((d, jnp.bfloat16) for d in (576, 2048, 3584, 4096, 5120, 8192)),
    *((d, jnp.float32) for d in (4096, 8192)),
)


def backward(norm: RmsNorm, h, dh, dx):
    """The gradient of h, which is normalized and added to a result behind."""
    graph, state = nnx.split(norm)
    run = lambda h: nnx.merge(graph, state).of_residual(h, "mosaic")
    return jax.vjp(run, h)[1]((dh, dx))


def main() -> None:
    """Compiles the kernels and writes the assembler's words and the program."""
    device.unsupported_device = lambda: None
    h200.write_output_to(sys.argv[1])
    of = jax.ShapeDtypeStruct
    for d, dtype in CASES:
        rows, scale = h200.placed([of((1001, d), dtype), of((d,), dtype)])
        run = jax.jit(norm_gradient, static_argnames=("eps", "offset"))
        run.lower(rows, scale, rows, rows, eps=1e-5, offset=True).compile()
    norm = RmsNorm(4096, eps=1e-5, dtype=jnp.dtype(jnp.bfloat16))
    graph, state = nnx.split(norm)
    shapes, rows = h200.placed([state, of((512, 4096), jnp.bfloat16)])
    run = jax.jit(lambda state, *given: backward(nnx.merge(graph, state), *given))
    text = run.lower(shapes, rows, rows, rows).compile().as_text()
    pathlib.Path(sys.argv[2]).write_text(text)


if __name__ == "__main__":
    main()

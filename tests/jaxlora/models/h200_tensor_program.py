"""Compiles a step of Llama-3.1-8B's layers for H200s that share each microbatch.

It is a program of its own, because XLA must be set up before JAX starts; see
`test_tensor_exchanges`.

usage: python -m tests.jaxlora.models.h200_tensor_program LAYERS TENSOR OUT

OUT gets the text of the compiled program.
"""

import functools
import pathlib
import sys

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxlora.adapters.stage_sharding import StageSharding
from jaxlora.models.division import table_axes, weight_specs
from jaxlora.models.forward import training_options
from jaxlora.pallas_kernels.mosaic import hopper as device
from jaxlora.sharding.mesh import STAGE_AXES
from tests import h200
from tests.jaxlora.models import h200_program as whole


def main() -> None:
    """Compiles the program and writes its text."""
    num_layers, tensor = map(int, sys.argv[1:3])
    device.num_sms = lambda: 132
    device.device_kind = lambda: "NVIDIA H200"
    device.unsupported_device = lambda: None
    spec = whole.decoder_spec(num_layers, fsdp=1).divided(tensor=tensor)
    devices = np.array(h200.devices(tensor)).reshape(1, 1, 1, tensor)
    placement = StageSharding(mesh=Mesh(devices, STAGE_AXES))
    params = placement.tables(spec.adapter_shapes(), table_axes(spec))
    replicated, rows = PartitionSpec(), placement.rows
    specs = weight_specs(spec), params, replicated, rows, replicated
    run = jax.shard_map(
        functools.partial(whole.step, spec),
        mesh=placement.mesh,
        in_specs=specs,
        out_specs=placement.by_device,
        check_vma=False,
    )
    jitted = jax.jit(run, compiler_options=training_options(spec))
    arguments = whole.arguments(spec, placement.mesh, specs, num_devices=1)
    compiled = jitted.lower(*arguments).compile()
    pathlib.Path(sys.argv[3]).write_text(compiled.as_text())


if __name__ == "__main__":
    main()

"""Compiles a training step with the Triton kernels for an older GPU, without a GPU.

It is a program of its own, because XLA must be set up before JAX starts; see
`test_triton_program`.

usage: python -m tests.jaxlora.models.triton_program DEVICE OUT

DEVICE is one of `DEVICES`. OUT gets the text of the compiled program.
"""

import dataclasses
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxlora.models.forward import training_options
from jaxlora.models.options import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.pallas_kernels.triton.target import forced_capability
from tests.jaxlora.models import h200_program

# Compute capability times ten, and the number of multiprocessors.
DEVICES = {"l40s": (89, 142), "a100": (80, 108)}
LAYERS = 2


def decoder_spec() -> DecoderSpec:
    """A small Llama with the widths of one: grouped heads, gate and up, and a head."""
    spec = h200_program.decoder_spec(LAYERS)
    config = dataclasses.replace(
        spec.config,
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1408,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
    )
    options = DecoderOptions(
        dtype=jnp.dtype(jnp.bfloat16),
        implementation="triton",
        attention="triton",
        max_segment_tokens=2048,
    )
    return dataclasses.replace(spec, config=config, options=options)


def main() -> None:
    """Compiles the program and writes its text."""
    device, out = sys.argv[1], pathlib.Path(sys.argv[2])
    capability, num_sms = DEVICES[device]
    spec = decoder_spec()
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=pathlib.Path(f"tests/{device}.txtpb").read_text(),
        topology="1x1x1",
    )
    mesh = Mesh(np.array(topology.devices).reshape(1, 1), ("data", "fsdp"))
    whole = jax.sharding.PartitionSpec()
    specs = (whole,) * 5
    run = jax.shard_map(
        functools.partial(h200_program.step, spec),
        mesh=mesh,
        in_specs=specs,
        out_specs=h200_program.ROWS,
        check_vma=False,
    )
    jitted = jax.jit(run, compiler_options=training_options(spec))
    with forced_capability(capability, num_sms=num_sms):
        arguments = h200_program.arguments(spec, mesh, specs, num_devices=1)
        lowered = jitted.lower(*arguments)
    out.write_text(lowered.compile().as_text())


if __name__ == "__main__":
    main()

"""Compiles a training step of Llama-3.1-8B's layers for four H200s, without a GPU.

It is a program of its own, because XLA must be set up before JAX starts; see
`test_gathers`.

usage: python -m tests.jaxlora.models.h200_program LAYERS OUT

OUT gets the text of the compiled program.
"""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlora.models.config import ModelConfig, Rope
from jaxlora.models.division import weight_specs
from jaxlora.models.families.llama import Llama
from jaxlora.models.forward import job_losses, training_options
from jaxlora.models.options import DecoderOptions
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import to_modules
from jaxlora.models.structure import linears
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.pallas_kernels.mosaic import hopper as device
from jaxlora.plan.memory.inputs import key_shapes
from jaxlora.sharding import layerwise
from tests import h200

NUM_DEVICES, TOKENS = 4, 8192
ROWS = PartitionSpec("fsdp")


def decoder_spec(num_layers: int, fsdp: int = NUM_DEVICES) -> DecoderSpec:
    config = ModelConfig(
        family=Llama.FAMILY,
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=8192,
        rms_eps=1e-5,
        rope=Rope(theta=5e5),
        layer_windows=(None,) * num_layers,
    )
    names = (f"layers.{i}.{n}" for i in range(num_layers) for n in linears(config))
    return DecoderSpec(
        config=config,
        options=DecoderOptions(
            dtype=jnp.dtype(jnp.bfloat16),
            implementation="mosaic",
            attention="cudnn",
            max_segment_tokens=2048,
            mean_segment_tokens=400,
            fsdp=fsdp,
        ),
        slots=SlotShape(num_slots=4, rank=16),
        adapted=tuple(sorted(names)),
    )


def batch_shapes(num_devices: int) -> PackedBatch:
    """Shapes of the microbatches of all devices."""

    def rows(dtype, length=TOKENS):
        return jax.ShapeDtypeStruct((num_devices * length,), dtype)

    ids = rows(jnp.int32)
    return PackedBatch(
        token_ids=ids,
        positions=ids,
        segment_ids=ids,
        labels=ids,
        loss_inputs={"next_token": {"weight": rows(jnp.float32)}},
        token_index=ids,
        block_adapter=rows(jnp.int32, TOKENS // 64),
    )


def step(spec: DecoderSpec, base, params, settings, batch, keys):
    """Losses and gradients on one device."""

    def total(tables):
        out = job_losses(spec, base, tables, settings, batch, keys)
        return out.loss.sum(), out

    tables = to_modules(spec.stacks, params)
    result = jax.grad(total, has_aux=True)(tables)
    return jax.tree.map(lambda x: x[None], result)


def arguments(
    spec: DecoderSpec, mesh: Mesh, specs, num_devices: int = NUM_DEVICES
) -> list:
    """Shapes and placements of the arguments of `step`."""
    shapes = (
        spec.base_shapes(),
        spec.adapter_shapes(),
        spec.settings_shapes(),
        batch_shapes(num_devices),
        key_shapes(spec),
    )

    def placed(spec, tree):
        where = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), tree
        )

    def is_spec(x):
        return isinstance(x, PartitionSpec)

    return jax.tree.map(placed, specs, shapes, is_leaf=is_spec)


def main() -> None:
    """Compiles the program and writes its text."""
    num_layers, out = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    device.num_sms = lambda: 132
    device.device_kind = lambda: "NVIDIA H200"
    device.unsupported_device = lambda: None
    layerwise.has_symmetric_buffers = lambda: True
    spec = decoder_spec(num_layers)
    devices = np.array(h200.devices(NUM_DEVICES))
    mesh = Mesh(devices.reshape(1, NUM_DEVICES), ("data", "fsdp"))
    whole = PartitionSpec()
    specs = weight_specs(spec), whole, whole, ROWS, whole
    run = jax.shard_map(
        functools.partial(step, spec),
        mesh=mesh,
        in_specs=specs,
        out_specs=ROWS,
        check_vma=False,
    )
    jitted = jax.jit(run, compiler_options=training_options(spec))
    lowered = jitted.lower(*arguments(spec, mesh, specs))
    out.write_text(lowered.compile().as_text())


if __name__ == "__main__":
    main()

"""Compiles the passes of meshes for H200s, without a GPU, and reads their memory.

It is a program of its own, because XLA must be set up before JAX starts; see
`test_compiled_stages`.

usage: python -m tests.jaxlora.plan.memory.h200_stages OUT REMAT MESH...

OUT gets, for each mesh, the bytes that each stage is estimated to need, and those that
the compiler reports, as JSON.
"""

import json
import pathlib
import sys

import jax

from jaxlora.costs.gpus import find_speed
from jaxlora.costs.stages import stage_borders
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.pallas_kernels.mosaic import hopper as device
from jaxlora.plan.memory.footprint import StagePrograms
from jaxlora.plan.stages import (
    MeshStages,
    estimated_footprint,
    measured_footprint,
)
from jaxlora.programs.program import Prepared
from jaxlora.scheduler import Limits
from jaxlora.sharding import layerwise
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.train.execute.layout import Layout, Stage
from tests import h200
from tests.llama import LLAMA_8B, decoder, with_layers

KIND, LAYERS_PER_STAGE = "NVIDIA H200", 2
LIMITS = Limits(capacity=8192, block_tokens=64)


def spec_of(remat: str, num_layers: int) -> DecoderSpec:
    return decoder(
        with_layers(LLAMA_8B, num_layers),
        slots=SlotShape(num_slots=4, rank=16, use_dropout=True),
        implementation="mosaic",
        attention="cudnn",
        max_segment_tokens=4096,
        mean_segment_tokens=800,
        remat=remat,
    )


def compile_stage(stage: Stage) -> StagePrograms:
    steps = stage.steps
    return steps.passes.prepare(steps.shapes(LIMITS)).map(Prepared.compiled)


def compare(words: str, remat: str, devices) -> list[dict[str, int]]:
    sizes = MeshSizes.parse(words)
    spec = spec_of(remat, LAYERS_PER_STAGE * sizes.stage)
    stages = MeshStages(
        spec=spec,
        sizes=sizes,
        borders=stage_borders(spec, sizes.stage, find_speed(KIND)),
        in_flight=sizes.stage,
    )
    layout = Layout.of(stages, devices=devices)
    programs = [compile_stage(stage) for stage in layout.stages]
    found = measured_footprint(stages, programs, LIMITS)
    assert found is not None
    with jax.default_device(devices[0]):  # for which attention is compiled
        guess = estimated_footprint(stages, LIMITS.block_tokens, LIMITS.capacity)
    return [
        {
            "estimated": own.total_bytes(LIMITS.capacity),
            "compiled": real.total_bytes(LIMITS.capacity),
        }
        for own, real in zip(guess.stages, found.stages, strict=True)
    ]


def main() -> None:
    """Compiles the meshes, and writes what they need."""
    out, remat, *meshes = sys.argv[1:]
    device.num_sms = lambda: 132
    device.device_kind = lambda: KIND
    device.unsupported_device = lambda: None
    layerwise.has_symmetric_buffers = lambda: True
    needed = max(MeshSizes.parse(mesh).num_devices for mesh in meshes)
    devices = h200.devices(needed)
    found = {mesh: compare(mesh, remat, devices) for mesh in meshes}
    pathlib.Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

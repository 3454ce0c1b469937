"""Compiles the optimizer's programs for many devices, and prints their memory.

It is a program of its own, because the number of devices is set before JAX starts; see
`test_exchange`.

usage: python -m tests.jaxlora.adapters.exchange_program PLATFORM DEVICES SLOTS OUT

OUT gets a JSON object: the temporary bytes of each program, the bytes of the slots and
the bytes that are estimated.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.adapters.optimizer import AdapterState, OptimizerInputs, Pending
from jaxlora.adapters.stage_sharding import REPLICATED, StageSharding
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.modules.trained_tensors import rate_ratios
from jaxlora.plan.memory.footprint import StageUse, num_bytes, optimizer_bytes
from jaxlora.sharding.mesh import STAGE_AXES
from jaxlora.train.execute.step import CompiledSteps
from tests import h200
from tests.llama import LLAMA_1B, decoder


def find_devices(platform: str, number: int) -> list[Any]:
    """Returns simulated CPU devices, or H200s that are not here, of 8 a host."""
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", number)
        return jax.devices()
    return h200.devices(number)


def temporary_bytes(spec: DecoderSpec, placement: StageSharding) -> dict[str, int]:
    """Returns the temporary bytes of each program of an optimizer step."""
    assert spec.slots is not None
    size, parts = spec.slots.num_slots, placement.num_lanes

    def tables(where, *axes: int) -> dict[str, jax.ShapeDtypeStruct]:
        sharding = placement.sharding(where)
        return {
            name: jax.ShapeDtypeStruct((*axes, *s.shape), s.dtype, sharding=sharding)
            for name, s in spec.adapter_shapes().items()
        }

    def row(dtype=jnp.float32) -> Any:
        return jax.ShapeDtypeStruct((size,), dtype)

    partial = placement.sharding(placement.rows)
    pending = Pending(
        gradients=tables(placement.rows, parts),
        is_finite=jax.ShapeDtypeStruct((parts, size), jnp.bool_, sharding=partial),
    )
    slots = tables(REPLICATED)
    state = AdapterState(
        params=slots, optimizer_state={"mu": slots, "nu": slots}, pending=pending
    )
    rates = {f.name: row() for f in dataclasses.fields(OptimizerInputs)}
    own = dict(
        step_mask=row(jnp.bool_),
        count=row(jnp.int32),
        rate_ratio=rate_ratios(lambda ratio: row()),
        settings={"adamw": {name: row() for name in ("b1", "b2", "eps")}},
        optimizer=row(jnp.int32),
    )
    rank = jax.ShapeDtypeStruct((len(spec.adapted), size), jnp.int32)
    steps, slot = CompiledSteps(spec, placement), np.int32(0)
    lowered = {
        "exchange": steps.exchange.jitted.lower(pending, slot),
        "measure": steps.measure.jitted.lower(pending),
        "step": steps.step.jitted.lower(
            state, OptimizerInputs(**rates | own), (), rank
        ),
    }
    found = {name: one.compile().memory_analysis() for name, one in lowered.items()}
    return {name: one.temp_size_in_bytes for name, one in found.items()}


def main() -> None:
    """Compiles the programs and writes their memory."""
    platform, out = sys.argv[1], pathlib.Path(sys.argv[4])
    number, num_slots = map(int, sys.argv[2:4])
    config = dataclasses.replace(LLAMA_1B, num_layers=2, layer_windows=(None,) * 2)
    slots = SlotShape(num_slots=num_slots, rank=16)
    spec = dataclasses.replace(decoder(config), slots=slots)
    devices = np.array(find_devices(platform, number)).reshape(1, number, 1, 1)
    mesh = jax.sharding.Mesh(devices, STAGE_AXES)
    found = temporary_bytes(spec, StageSharding(mesh=mesh))
    if platform != "cpu":  # where the estimate is for the devices that are here
        jax.default_backend = lambda: platform
    found["slots"] = num_bytes(spec.adapter_shapes())
    use = StageUse(num_shards=1, num_parts=number, num_kept=1, num_waiting=0)
    found["estimate"] = optimizer_bytes(spec, use)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""Shapes of a training step's inputs, to trace or compile it before there is data."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlora.adapters.stage_sharding import ONE_DEVICE, REPLICATED, StageSharding
from jaxlora.models.forward import SlotKeys
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.spec import DecoderSpec
from jaxlora.objectives.table import (
    NEXT_TOKEN,
    OBJECTIVES,
    has_baseline,
    has_groups,
    has_reference,
)
from jaxlora.scheduler import Limits


def batch_shapes(
    limits: Limits,
    placement: StageSharding = ONE_DEVICE,
    objectives: Sequence[str] = (NEXT_TOKEN.name,),
) -> PackedBatch:
    """Shapes of a microbatch of `limits.capacity` tokens on each device of a stage.

    Args:
        limits: Capacity and block size.
        placement: The devices.
        objectives: Objectives of the run.
    """
    where = placement.sharding(placement.rows)
    num_rows = placement.num_lanes * limits.capacity

    def shape(sizes: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

    rows, blocks = shape((num_rows,)), shape((num_rows // limits.block_tokens,))
    return PackedBatch(
        token_ids=rows,
        positions=rows,
        segment_ids=rows,
        labels=rows,
        loss_inputs={
            name: {
                key: shape(sizes, jnp.float32)
                for key, sizes in OBJECTIVES[name].input_shapes(num_rows).items()
            }
            for name in objectives
        },
        group_ids=rows if has_groups(objectives) else None,
        token_index=rows,
        block_adapter=blocks,
        reference_nll=(
            shape((num_rows,), jnp.float32) if has_reference(objectives) else None
        ),
    )


def key_shapes(spec: DecoderSpec, placement: StageSharding = ONE_DEVICE) -> SlotKeys:
    """Shapes of the keys of the dropout masks, and of the baselines."""
    assert spec.slots is not None
    each: Any = jax.ShapeDtypeStruct((spec.slots.num_slots,), jnp.int32)
    return SlotKeys(seed=each, step=each, baseline=baseline_shape(spec, placement))


def baseline_shape(spec: DecoderSpec, placement: StageSharding = ONE_DEVICE) -> Any:
    """Shape of the baselines of the slots; None if the stage does not read them."""
    assert spec.slots is not None
    if not (spec.has_head and has_baseline(spec.options.objectives)):
        return None
    where = placement.sharding(REPLICATED)
    return jax.ShapeDtypeStruct((spec.slots.num_slots,), jnp.float32, sharding=where)

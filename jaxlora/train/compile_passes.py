"""Compiles the passes of a run before it trains."""

import jax

from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.models.forward import Base
from jaxlora.scheduler import Limits
from jaxlora.train.layout import Layout


def compile_step(
    layout: Layout, params: Base, slots: StagedSlots, limits: Limits
) -> jax.stages.Compiled:
    """Compiles the training step of a layout with a single stage.

    Args:
        layout: The stage.
        params: Frozen weights.
        slots: The slots.
        limits: Limits of the microbatches.
    """
    (stage,), (table,), (base,) = layout.stages, slots.tables, layout.bases(params)
    return stage.steps.compile_accumulate(base, table.state, table.settings, limits)


def compile_stages(
    layout: Layout, params: Base, slots: StagedSlots, limits: Limits
) -> None:
    """Compiles the passes of all stages, so that none waits for another in training.

    Args:
        layout: The stages of a pipeline.
        params: Frozen weights.
        slots: The slots.
        limits: Limits of the microbatches.
    """
    parts = zip(layout.stages, layout.bases(params), slots.tables, strict=True)
    for number, (stage, base, table) in enumerate(parts, start=1):
        name = f"stage {number} of {len(layout.stages)}"
        state, settings = table.state, table.settings
        stage.steps.compile_passes(base, state, settings, limits, name)

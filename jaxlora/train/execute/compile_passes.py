"""Compiles the passes of a run before it trains."""

from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.memory.footprint import StagePrograms
from jaxlora.models.forward import Base
from jaxlora.scheduler import Limits
from jaxlora.train.execute.layout import Layout


def compile_stages(
    layout: Layout, params: Base, slots: StagedSlots, limits: Limits
) -> tuple[StagePrograms, ...]:
    """Compiles the passes of all stages, so that none waits for another in training.

    Args:
        layout: The stages.
        params: Frozen weights.
        slots: The slots.
        limits: Limits of the microbatches.
    """
    found, num_stages = [], len(layout.stages)
    parts = zip(layout.stages, layout.bases(params), slots.tables, strict=True)
    for number, (stage, base, table) in enumerate(parts, start=1):
        args = base, table.state, table.settings, limits
        if num_stages == 1:
            program = stage.steps.compile_accumulate(*args)
            found.append(StagePrograms(last=program))
            continue
        name = f"stage {number} of {num_stages}"
        found.append(stage.steps.compile_passes(*args, name))
    return tuple(found)

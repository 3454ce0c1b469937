"""The error for a run that does not fit into memory, and what would make it fit."""

import bisect
import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator

from jaxlora.models.options import Remat
from jaxlora.plan.memory.bounds import largest_fitting
from jaxlora.plan.memory.device_memory import DeviceMemory, format_bytes
from jaxlora.plan.memory.footprint import Footprint
from jaxlora.plan.memory.need import DoesNotFitError, MemoryNeed
from jaxlora.plan.run_plan import RunPlan
from jaxlora.plan.stages import MeshFootprint, MeshStages, estimated_footprint


def refusal(
    plan: RunPlan, found: MeshFootprint, available: DeviceMemory, why: str = ""
) -> DoesNotFitError:
    """Returns the error for a run that needs more memory than there is.

    Args:
        plan: The plan of the run.
        found: Memory of the run; without a training step if the weights and adapters
            alone do not fit.
        available: Memory of each device.
        why: What comes before the memory that it needs.
    """
    stages = plan.stages
    limit = available.num_bytes
    has_step = any(stage.bytes_per_token for stage in found.stages)
    tokens = plan.config.limits.capacity if has_step else 0
    cures = list(_slot_cures(stages, found, tokens, limit))
    if tokens:
        cures = [
            *_remat_cures(plan, found, limit),
            *_capacity_cures(plan, found, limit),
            *cures,
        ]
    need = MemoryNeed.of(stages, found, tokens, available)
    advice = f"One of these would make {need.subject} fit:\n- " + "\n- ".join(cures)
    if not cures:
        also = " More devices, along fsdp, stage or tensor, might too."
        advice = (
            "No single setting of remat, microbatch_tokens, max_concurrent_jobs or "
            "slot_rank would make it fit; together they might."
        )
        advice += also if stages.sizes.num_devices > 1 else ""
    text = (
        f"{why}this run needs {format_bytes(need.total_bytes)}{need.where} "
        f"({need.describe_parts()}), and there are {format_bytes(limit)} "
        f"({available.source}). {advice}"
    )
    return DoesNotFitError(text, need, str(stages.sizes), tuple(cures))


def _capacity_cures(plan: RunPlan, found: MeshFootprint, limit: int) -> Iterator[str]:
    """Yields the largest capacity at which the run fits."""
    estimate = functools.partial(_corrected(plan, found), plan.config.weakest_remat)
    fitting = largest_fitting(plan.bounds, estimate, limit)
    if fitting is not None:
        yield f"microbatch_tokens: {fitting}"


def _slot_cures(
    stages: MeshStages, found: MeshFootprint, tokens: int, limit: int
) -> Iterator[str]:
    """Yields the most slots and the largest rank, each of which would fit alone."""
    slots = stages.spec.slots
    assert slots is not None

    def is_too_large(number: int, of: int) -> bool:
        return any(
            dataclasses.replace(
                stage, adapter_bytes=stage.adapter_bytes * number // of
            ).total_bytes(tokens)
            > limit
            for stage in found.stages
        )

    for key, current in (
        ("max_concurrent_jobs", slots.num_slots),
        ("slot_rank", slots.rank),
    ):
        numbers = range(1, current)
        most = bisect.bisect(numbers, False, key=lambda n: is_too_large(n, current))
        if most:
            also = ", and no job of a larger rank" if key == "slot_rank" else ""
            yield f"{key}: {most}{also}"


def _remat_cures(plan: RunPlan, found: MeshFootprint, limit: int) -> Iterator[str]:
    """Yields the weakest remat, stronger than the run's, that makes the run fit."""
    choices = typing.get_args(Remat)
    tokens, estimate = plan.config.limits.capacity, _corrected(plan, found)
    for remat in choices[choices.index(plan.config.weakest_remat) + 1 :]:
        needed = estimate(remat, tokens).total_bytes(tokens)
        if needed <= limit:
            yield f"remat: {remat} (needs about {format_bytes(needed)})"
            return


def _corrected(
    plan: RunPlan, found: MeshFootprint
) -> Callable[[Remat, int | None], MeshFootprint]:
    """Returns an estimate by remat and capacity, corrected by what the run needs.

    The error of the estimate with the run's own settings corrects the others.
    """
    config = plan.config

    def estimate(remat: Remat, tokens: int | None) -> MeshFootprint:
        other = plan.stages.with_remat(remat)
        return estimated_footprint(other, config.block_tokens, tokens)

    tokens = config.limits.capacity
    tightest = found.tightest(tokens)
    own = estimate(config.weakest_remat, tokens).stages[tightest]
    factor = found.stages[tightest].step_bytes(tokens) / own.step_bytes(tokens)

    def corrected(remat: Remat, tokens: int | None) -> MeshFootprint:
        parts = (_scaled(s, factor) for s in estimate(remat, tokens).stages)
        return MeshFootprint(stages=tuple(parts))

    return corrected


def _scaled(stage: Footprint, factor: float) -> Footprint:
    return dataclasses.replace(
        stage,
        bytes_per_token=factor * stage.bytes_per_token,
        transient_bytes_per_token=factor * stage.transient_bytes_per_token,
    )

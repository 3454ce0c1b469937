"""Corrects the capacity and `remat` of a run by what the compiler reports."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from jaxlora.common.note import Note
from jaxlora.plan import stages as mesh_stages
from jaxlora.plan.memory import device_memory as device
from jaxlora.plan.memory.bounds import Bounds, largest_fitting
from jaxlora.plan.memory.device_memory import DeviceMemory, format_bytes
from jaxlora.plan.memory.footprint import StagePrograms
from jaxlora.plan.memory.need import MemoryNeed
from jaxlora.plan.memory.refusal import refusal
from jaxlora.plan.run_plan import RunPlan
from jaxlora.plan.stages import MeshFootprint

_ENOUGH = 0.85  # a choice that needs less than this share of the memory is made again


def fit(
    plan: RunPlan, compile_stages: Callable[[RunPlan], Sequence[StagePrograms]]
) -> RunPlan:
    """Returns the plan with a `remat` and a number of tokens at which it fits.

    All passes are compiled, and their memory is read from the compiler. An automatic
    number of tokens is lowered until the step fits, and raised once if much memory
    remains free; if no number fits, an automatic `remat` becomes a stronger one.

    Args:
        plan: The plan, with settings that are estimated to fit.
        compile_stages: Compiles the passes of all stages of a plan, while base and
            slots are on the devices.

    Returns:
        The plan with what it needs. Its notes are those of fitting.

    Raises:
        ConfigError: The run does not fit, and its capacity cannot be lowered.
    """
    first = mesh_stages.resident_footprint(plan.stages).stages[0]
    available = device.device_memory(first.base_bytes + first.adapter_bytes)
    if available is not None:
        available = available.share(plan.config.num_devices)
        check_resident(plan, available)
    given, search, notes = plan, _Search(plan.bounds), []
    while True:
        programs, tokens = compile_stages(plan), plan.config.limits.capacity
        limits = plan.config.limits
        found = mesh_stages.measured_footprint(plan.stages, programs, limits)
        if available is None or found is None:
            who = "device's allocator" if available is None else "compiler"
            notes.append(Note(f"memory: not checked, as the {who} does not report it"))
            return dataclasses.replace(plan, notes=tuple(notes))
        chosen = search.next_capacity(tokens, found, available.num_bytes)
        if chosen == tokens:
            need = MemoryNeed.of(plan.stages, found, tokens, available)
            text = (
                f"memory: {format_bytes(need.total_bytes)} needed{need.where} with "
                f"microbatches of {tokens} tokens, {format_bytes(available.num_bytes)} "
                f"available ({available.source})"
            )
            notes.append(Note(text))
            return dataclasses.replace(plan, need=need, notes=tuple(notes))
        if chosen is None:
            plan, search = (
                _stronger(given, plan, found, available),
                _Search(plan.bounds),
            )
            notes.append(Note(f"remat: auto: {plan.config.remat}, as less needs more"))
            continue
        why = describe_capacity(chosen, "measured", found, available, plan.bounds)
        notes.append(Note(why))
        plan = given.with_config(plan.config.replace(microbatch_tokens=chosen))


def check_resident(plan: RunPlan, available: DeviceMemory) -> None:
    """Refuses a run whose weights and slots alone do not fit."""
    resident = mesh_stages.resident_footprint(plan.stages)
    if resident.total_bytes(0) > available.num_bytes:
        raise refusal(plan, resident, available)


def _stronger(
    given: RunPlan, plan: RunPlan, found: MeshFootprint, available: DeviceMemory
) -> RunPlan:
    """Returns the plan with the next `remat` that is estimated to fit, or the last.

    Raises:
        ConfigError: There is no stronger one.
    """
    config, bounds, limit = plan.config, plan.bounds, available.num_bytes
    stronger = bounds.stronger_than(config.weakest_remat)
    if not stronger:
        raise refusal(plan, found, available)
    for remat in stronger:
        plan = given.with_config(config.replace(remat=remat))
        estimate = functools.partial(
            mesh_stages.estimated_footprint, plan.stages, config.block_tokens
        )
        most = bounds.fixed or largest_fitting(bounds, estimate, limit)
        tokens = most or bounds.smallest
        plan = plan.with_config(plan.config.replace(microbatch_tokens=tokens))
        if most and estimate(tokens).total_bytes(tokens) <= limit:
            break
    return plan


class _Search:
    """Chooses the capacity to compile next from those that were measured."""

    def __init__(self, bounds: Bounds):
        self._bounds = bounds
        self._fits = 0  # the largest capacity that was measured to fit
        self._too_large: int | None = None
        self._may_grow = True

    def next_capacity(
        self, tokens: int, found: MeshFootprint, limit: int
    ) -> int | None:
        """Returns the capacity to compile next; `tokens` if it is settled.

        Args:
            tokens: Capacity that was measured.
            found: Its footprint.
            limit: Bytes of available memory.

        Returns:
            The capacity; None if no allowed one fits.
        """
        bounds, needed = self._bounds, found.total_bytes(tokens)
        if needed > limit:
            if bounds.fixed is not None:
                return None
            self._too_large = tokens
        else:
            self._fits = tokens
            has_room = needed < _ENOUGH * limit and tokens < bounds.largest
            if bounds.fixed is not None or not (self._may_grow and has_room):
                return tokens
            self._may_grow = False
        chosen = bounds.choose(found.fitting_tokens(limit), self._too_large) or 0
        if max(chosen, self._fits):
            return max(chosen, self._fits)
        return None if self._too_large == bounds.smallest else bounds.smallest


def describe_capacity(
    chosen: int,
    how: str,
    found: MeshFootprint,
    available: DeviceMemory,
    bounds: Bounds,
) -> str:
    """Says in one line why a capacity was chosen."""
    stage = found.stages[found.tightest(chosen)]
    per_token = stage.bytes_per_token + stage.transient_bytes_per_token
    parts = (
        f"base {format_bytes(stage.base_bytes)}, adapters "
        f"{format_bytes(stage.adapter_bytes)} and {format_bytes(per_token)} per token"
    )
    return (
        f"microbatch_tokens: auto: {chosen}, {how}: {parts} make "
        f"{format_bytes(stage.total_bytes(chosen))} of "
        f"{format_bytes(available.num_bytes)} ({available.source}); at most "
        f"{bounds.largest}, which hold a step of every job"
    )

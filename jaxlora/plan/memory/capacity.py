"""Corrects the capacity and `remat` of a run by what the compiler reports."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.plan import stages as mesh_stages
from jaxlora.plan.memory import device_memory as device
from jaxlora.plan.memory.bounds import Bounds, largest_fitting
from jaxlora.plan.memory.device_memory import DeviceMemory, format_bytes
from jaxlora.plan.memory.footprint import StagePrograms
from jaxlora.plan.memory.need import MemoryNeed
from jaxlora.plan.memory.refusal import refusal
from jaxlora.plan.stages import (
    MeshFootprint,
    MeshStages,
)

_ENOUGH = 0.85  # a choice that needs less than this share of the memory is made again

# Compiles the passes of every stage of a run with these settings.
CompileStages = Callable[[RunConfig], Sequence[StagePrograms]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """A run that fits as it is compiled.

    Attributes:
        config: The run.
        need: What it needs; None: the compiler or the device reports nothing.
        notes: Why its settings were changed, and what it needs.
    """

    config: RunConfig
    need: MemoryNeed | None
    notes: tuple[Note, ...]


def fit(
    config: RunConfig,
    stages: MeshStages,
    bounds: Bounds,
    compile_stages: CompileStages,
) -> Fitted:
    """Returns the run with a `remat` and a number of tokens at which it fits.

    All passes are compiled, and their memory is read from the compiler. An automatic
    number of tokens is lowered until the step fits, and raised once if much memory
    remains free; if no number fits, an automatic `remat` becomes a stronger one.

    Args:
        config: The run, with the numbers that were estimated to fit.
        stages: Its stages.
        bounds: Bounds of the capacity, and the choices of an automatic `remat`.
        compile_stages: Compiles the passes of all stages, while base and slots are on
            the devices.

    Raises:
        ConfigError: The run does not fit, and its capacity cannot be lowered.
    """
    first = mesh_stages.resident_footprint(stages).stages[0]
    available = device.device_memory(first.base_bytes + first.adapter_bytes)
    if available is not None:
        available = available.share(config.num_devices)
        check_resident(config, stages, bounds, available)
    return _measured(config, stages, bounds, available, compile_stages)


def check_resident(
    config: RunConfig, stages: MeshStages, bounds: Bounds, available: DeviceMemory
) -> None:
    """Refuses a run whose weights and slots alone do not fit."""
    resident = mesh_stages.resident_footprint(stages)
    if resident.total_bytes(0) > available.num_bytes:
        raise refusal(config, stages, bounds, resident, available)


def _measured(
    config: RunConfig,
    stages: MeshStages,
    bounds: Bounds,
    available: DeviceMemory | None,
    compile_stages: CompileStages,
) -> Fitted:
    """Compiles all passes, again each time that the settings change."""
    search, notes = _Search(bounds), []
    while True:
        programs, tokens = compile_stages(config), config.limits.capacity
        found = mesh_stages.measured_footprint(stages, programs, config.limits)
        if available is None or found is None:
            who = "device's allocator" if available is None else "compiler"
            notes.append(Note(f"memory: not checked, as the {who} does not report it"))
            return Fitted(config=config, need=None, notes=tuple(notes))
        chosen = search.next_capacity(tokens, found, available.num_bytes)
        if chosen is None:
            stronger = _stronger(config, stages, bounds, available)
            if stronger is None:
                raise refusal(config, stages, bounds, found, available)
            notes.append(Note(f"remat: auto: {stronger.remat}, as less does not fit"))
            config, search = stronger, _Search(bounds)
            stages = stages.with_remat(config.weakest_remat)
            continue
        if chosen == tokens:
            notes.append(_describe_need(tokens, found, stages, available))
            need = MemoryNeed.of(stages, found, tokens, available)
            return Fitted(config=config, need=need, notes=tuple(notes))
        notes.append(
            Note(describe_capacity(chosen, "measured", found, available, bounds))
        )
        config = config.replace(microbatch_tokens=chosen)


def _stronger(
    config: RunConfig, stages: MeshStages, bounds: Bounds, available: DeviceMemory
) -> RunConfig | None:
    """Returns the run with the next `remat` that is estimated to fit, or the last."""
    found = None
    for remat in bounds.stronger_than(config.weakest_remat):
        estimate = functools.partial(
            mesh_stages.estimated_footprint,
            stages.with_remat(remat),
            config.block_tokens,
        )
        tokens = bounds.fixed or largest_fitting(bounds, estimate, available.num_bytes)
        found = config.replace(remat=remat, microbatch_tokens=tokens or bounds.smallest)
        if tokens and estimate(tokens).total_bytes(tokens) <= available.num_bytes:
            break
    return found


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


def _describe_need(
    tokens: int, found: MeshFootprint, stages: MeshStages, available: DeviceMemory
) -> Note:
    where = stages.describe(found.tightest(tokens))
    return Note(
        f"memory: {format_bytes(found.total_bytes(tokens))} needed{where} with "
        f"microbatches of {tokens} tokens, {format_bytes(available.num_bytes)} "
        f"available ({available.source})"
    )


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

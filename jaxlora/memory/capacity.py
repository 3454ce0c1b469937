"""Chooses the capacity of microbatches: the number asked for, or by device memory.

`settle` replaces `microbatch_tokens: auto` by a number before a run starts. It refuses
a run that its devices cannot hold, and names changes that would make it fit.
"""

import logging
from collections.abc import Callable

import jax

from jaxlora.config import RunConfig
from jaxlora.errors import ConfigError
from jaxlora.memory import device, estimate, mesh
from jaxlora.memory.bounds import Bounds
from jaxlora.memory.device import DeviceMemory, format_bytes
from jaxlora.memory.mesh import MeshFootprint, MeshStages
from jaxlora.memory.refusal import refusal
from jaxlora.models.spec import DecoderSpec
from jaxlora.scheduler import Limits

logger = logging.getLogger(__name__)

_ENOUGH = 0.85  # a choice that needs less than this share of the memory is made again


def settle(
    config: RunConfig,
    spec: DecoderSpec,
    bounds: Bounds,
    compile_step: Callable[[Limits], jax.stages.Compiled] | None = None,
    *,
    is_pinned: bool = False,
) -> RunConfig:
    """Returns the run with a number for `microbatch_tokens`, at which it fits.

    Without `compile_step`, `auto` becomes the largest number that is estimated to fit
    all stages of the mesh. With it, the training step is compiled for the number, and
    its memory is read from the compiler. For `auto`, the number is then lowered until
    the step fits, and raised once if much memory remains free. An earlier result of
    this function may be given as `config`, so that the estimate is not repeated.

    The steps of a pipeline's stages are not compiled here: the estimate decides.

    Args:
        config: The run; its mesh is not `auto`.
        spec: Decoder of the run.
        bounds: Bounds of the capacity.
        compile_step: Compiles the training step for microbatches of these limits, while
            base and slots are on the devices; only for a mesh with one stage.
        is_pinned: Whether the slots are divided among replicas.

    Raises:
        ConfigError: The run does not fit, and its capacity cannot be lowered; or the
            capacity is `auto` and the device does not report its memory.
    """
    stages = MeshStages.of(config, spec, is_pinned=is_pinned)
    resident = mesh.resident_footprint(stages)
    first = resident.stages[0]
    held = first.base_bytes + (first.adapter_bytes if compile_step else 0)
    available = device.device_memory(held, stages.sizes.num_devices)
    if available is None:
        config = _unchecked(config, bounds)
    elif resident.total_bytes(0) > available.num_bytes:
        raise refusal(config, stages, bounds, resident, available)
    elif config.microbatch_tokens == "auto" or stages.sizes.stage > 1:
        config = _estimated(config, stages, bounds, available)
    if compile_step is None:
        return config
    return _measured(config, stages, bounds, available, compile_step)


def _unchecked(config: RunConfig, bounds: Bounds) -> RunConfig:
    """Takes a fixed capacity as it is; the device does not report its memory."""
    if bounds.fixed is None:
        raise ConfigError(
            "microbatch_tokens: auto needs the size of the device's memory, which its "
            "allocator does not report (XLA_PYTHON_CLIENT_ALLOCATOR chooses the "
            "allocator). Give a number for microbatch_tokens."
        )
    return config.replace(microbatch_tokens=bounds.fixed)


def _estimated(
    config: RunConfig, stages: MeshStages, bounds: Bounds, available: DeviceMemory
) -> RunConfig:
    """Chooses the capacity by an estimate, unless it is fixed.

    Raises:
        ConfigError: A stage of a pipeline is estimated not to fit.
    """
    is_pipeline = stages.sizes.stage > 1
    if bounds.fixed is not None and not is_pipeline:
        return config.replace(microbatch_tokens=bounds.fixed)
    step_bytes = estimate.step_bytes(stages.spec, config.block_tokens)
    found = mesh.estimated_footprint(stages, step_bytes)
    chosen = bounds.fixed
    if chosen is None:
        # An estimate may be too high, so the smallest capacity is tried in any case.
        fitting = found.fitting_tokens(available.num_bytes)
        chosen = bounds.choose(fitting) or bounds.smallest
        _log_choice(chosen, "estimated", found, available, bounds)
    config = config.replace(microbatch_tokens=chosen)
    if is_pipeline and found.total_bytes(chosen) > available.num_bytes:
        raise refusal(config, stages, bounds, found, available)
    return config


def _measured(
    config: RunConfig,
    stages: MeshStages,
    bounds: Bounds,
    available: DeviceMemory | None,
    compile_step: Callable[[Limits], jax.stages.Compiled],
) -> RunConfig:
    """Compiles the training step, again each time that the capacity changes."""
    search = _Search(bounds)
    while True:
        program, tokens = compile_step(config.limits), config.limits.capacity
        found = mesh.measured_footprint(stages, program, config.limits)
        if available is None or found is None:
            who = "device's allocator" if available is None else "compiler"
            logger.info("memory: not checked, as the %s does not report it", who)
            return config
        chosen = search.next_capacity(tokens, found, available.num_bytes)
        if chosen is None:
            raise refusal(config, stages, bounds, found, available)
        if chosen == tokens:
            needed = format_bytes(found.total_bytes(tokens))
            there = format_bytes(available.num_bytes)
            logger.info(
                "memory: %s needed%s with microbatches of %d tokens, %s available (%s)",
                needed,
                stages.describe(0),
                tokens,
                there,
                available.source,
            )
            return config
        _log_choice(chosen, "measured", found, available, bounds)
        config = config.replace(microbatch_tokens=chosen)


class _Search:
    """Which capacity to compile next, by those that were measured."""

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


def _log_choice(
    chosen: int,
    how: str,
    found: MeshFootprint,
    available: DeviceMemory,
    bounds: Bounds,
) -> None:
    stage = found.stages[found.tightest(chosen)]
    per_token = stage.bytes_per_token + stage.transient_bytes_per_token
    logger.info(
        "microbatch_tokens: auto: %d, %s: base %s, adapters %s and %s per token make "
        "%s of %s (%s); at most %d, which hold a step of every job",
        chosen,
        how,
        format_bytes(stage.base_bytes),
        format_bytes(stage.adapter_bytes),
        format_bytes(per_token),
        format_bytes(stage.total_bytes(chosen)),
        format_bytes(available.num_bytes),
        available.source,
        bounds.largest,
    )

"""Chooses the capacity of microbatches and `remat`: as asked for, or by device memory.

`settle` replaces `microbatch_tokens: auto` by a number, and `remat: auto`, before a run
starts. It refuses a run that its devices cannot hold, and names changes that would make
it fit.
"""

import logging
from collections.abc import Callable, Sequence

from jaxlora.config import RunConfig
from jaxlora.costs.device_speed import find_speed
from jaxlora.errors import ConfigError
from jaxlora.memory import device, mesh, options
from jaxlora.memory.bounds import Bounds
from jaxlora.memory.device import DeviceMemory, format_bytes
from jaxlora.memory.footprint import StagePrograms
from jaxlora.memory.mesh import MeshFootprint, MeshStages
from jaxlora.memory.refusal import refusal
from jaxlora.models.spec import DecoderSpec
from jaxlora.pallas_kernels.device import device_kind

logger = logging.getLogger(__name__)

_UNCHECKED_TOKENS = 4096  # for a device that does not report its memory
_ENOUGH = 0.85  # a choice that needs less than this share of the memory is made again

# Compiles the passes of every stage of a run with these settings.
CompileStages = Callable[[RunConfig], Sequence[StagePrograms]]


def settle(
    config: RunConfig,
    spec: DecoderSpec,
    bounds: Bounds,
    compile_stages: CompileStages | None = None,
    *,
    stages: MeshStages | None = None,
) -> RunConfig:
    """Returns the run with a `remat` and a number of tokens at which it fits.

    Without `compile_stages`, `microbatch_tokens: auto` becomes the largest number that
    is estimated to fit all stages of the mesh, and `remat: auto` becomes the one that
    is predicted to be fastest with its number. With `compile_stages`, all passes are
    compiled for them, and their memory is read from the compiler. An automatic number
    is then lowered until the step fits, and raised once if much memory remains free; if
    no number fits, an automatic `remat` becomes a stronger one. An earlier result of
    this function may be given as `config`, so that the estimate is not repeated.

    Args:
        config: The run; its mesh is not `auto`.
        spec: Decoder of the run.
        bounds: Bounds of the capacity, and the choices of an automatic `remat`.
        compile_stages: Compiles the passes of all stages, while base and slots are on
            the devices.
        stages: The stages as they are laid out; None: as they would be.

    Raises:
        ConfigError: The run does not fit, and its capacity cannot be lowered; or
            `remat` is `auto` and the device does not report its memory.
    """
    stages = stages or MeshStages.of(config, spec)
    resident = mesh.resident_footprint(stages)
    first = resident.stages[0]
    held = first.base_bytes + (first.adapter_bytes if compile_stages else 0)
    available = device.device_memory(held, stages.sizes.num_devices)
    if available is None:
        config = _unchecked(config, bounds)
    elif resident.total_bytes(0) > available.num_bytes:
        raise refusal(config, stages, bounds, resident, available)
    elif _is_auto(config) or (stages.sizes.stage > 1 and compile_stages is None):
        config = _estimated(config, stages, bounds, available)
    if compile_stages is None:
        return config
    stages = stages.with_remat(config.least_remat)
    return _measured(config, stages, bounds, available, compile_stages)


def _is_auto(config: RunConfig) -> bool:
    return "auto" in (config.microbatch_tokens, config.remat)


def _unchecked(config: RunConfig, bounds: Bounds) -> RunConfig:
    """Chooses without the size of the memory, which the device does not report."""
    if config.remat == "auto":
        raise ConfigError(
            "remat: auto needs the size of the device's memory, which its allocator "
            "does not report (XLA_PYTHON_CLIENT_ALLOCATOR chooses the allocator). Give "
            "none, elementwise, mlp or layer for remat."
        )
    if bounds.fixed is not None:
        return config.replace(microbatch_tokens=bounds.fixed)
    tokens = bounds.choose(max(_UNCHECKED_TOKENS, bounds.smallest))
    logger.warning(
        "microbatch_tokens: auto: %d, at most %d if a sample allows it, as the "
        "device's allocator does not report its memory "
        "(XLA_PYTHON_CLIENT_ALLOCATOR chooses the allocator). Give a number if the run "
        "has room for more, or for less.",
        tokens,
        _UNCHECKED_TOKENS,
    )
    return config.replace(microbatch_tokens=tokens)


def _estimated(
    config: RunConfig, stages: MeshStages, bounds: Bounds, available: DeviceMemory
) -> RunConfig:
    """Chooses what is `auto` by an estimate.

    Raises:
        ConfigError: A stage of a pipeline is estimated not to fit.
    """
    is_pipeline = stages.sizes.stage > 1
    if bounds.fixed is not None and not bounds.remats and not is_pipeline:
        return config.replace(microbatch_tokens=bounds.fixed)
    speed = find_speed(device_kind())
    found = options.find_options(config, stages, bounds, available, speed)
    chosen = options.fastest(found)
    if bounds.remats:
        logger.info("%s", options.explain(chosen, found))
    if bounds.fixed is None:
        _log_choice(chosen.tokens, "estimated", chosen.found, available, bounds)
    config = chosen.applied(config)
    if is_pipeline and not chosen.fits:
        raise refusal(config, chosen.stages, bounds, chosen.found, available)
    return config


def _measured(
    config: RunConfig,
    stages: MeshStages,
    bounds: Bounds,
    available: DeviceMemory | None,
    compile_stages: CompileStages,
) -> RunConfig:
    """Compiles all passes, again each time that the settings change."""
    search = _Search(bounds)
    while True:
        programs, tokens = compile_stages(config), config.limits.capacity
        found = mesh.measured_footprint(stages, programs, config.limits)
        if available is None or found is None:
            who = "device's allocator" if available is None else "compiler"
            logger.info("memory: not checked, as the %s does not report it", who)
            return config
        chosen = search.next_capacity(tokens, found, available.num_bytes)
        if chosen is None:
            stronger = bounds.stronger_than(config.least_remat)
            if stronger is None:
                raise refusal(config, stages, bounds, found, available)
            config = _estimated(config, stages, stronger, available)
            stages = stages.with_remat(config.least_remat)
            search = _Search(stronger)
            continue
        if chosen == tokens:
            _log_needed(tokens, found, stages, available)
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


def _log_needed(
    tokens: int, found: MeshFootprint, stages: MeshStages, available: DeviceMemory
) -> None:
    logger.info(
        "memory: %s needed%s with microbatches of %d tokens, %s available (%s)",
        format_bytes(found.total_bytes(tokens)),
        stages.describe(found.tightest(tokens)),
        tokens,
        format_bytes(available.num_bytes),
        available.source,
    )


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

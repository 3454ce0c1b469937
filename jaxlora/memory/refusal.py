"""The error for a run that does not fit into memory, and what would make it fit."""

import bisect
import dataclasses
import typing
from collections.abc import Iterator

from jaxlora.config import RunConfig
from jaxlora.errors import ConfigError
from jaxlora.memory.bounds import Bounds
from jaxlora.memory.device import DeviceMemory, format_bytes
from jaxlora.memory.estimate import estimated_footprint
from jaxlora.memory.footprint import Footprint
from jaxlora.models.decoder import Remat
from jaxlora.models.spec import DecoderSpec


def refusal(
    config: RunConfig,
    spec: DecoderSpec,
    bounds: Bounds,
    found: Footprint,
    available: DeviceMemory,
) -> ConfigError:
    """Returns the error for a run that needs more memory than there is.

    Args:
        config: The run.
        spec: Decoder of the run.
        bounds: Bounds of the capacity.
        found: Memory of the run; without a training step if the weights and adapters
            alone do not fit.
        available: Memory of the device.
    """
    limit = available.num_bytes
    tokens = config.limits.capacity if found.bytes_per_token else 0
    base, adapters = found.base_bytes, found.adapter_bytes
    parts = f"base {format_bytes(base)}, adapters {format_bytes(adapters)}"
    if tokens:
        step = format_bytes(found.total_bytes(tokens) - base - adapters)
        parts += f", a training step of {tokens} tokens {step}"
    cures = list(_slot_cures(spec, found, tokens, limit))
    if tokens:
        cures = [
            *_remat_cures(config, spec, found, limit),
            *_capacity_cures(bounds, found, limit),
            *cures,
        ]
    advice = "One of these would make it fit:\n- " + "\n- ".join(cures)
    if not cures:
        advice = (
            "No single setting of remat, microbatch_tokens, max_concurrent_jobs or "
            "slot_rank would make it fit; together they might."
        )
    return ConfigError(
        f"this run needs {format_bytes(found.total_bytes(tokens))} ({parts}), and "
        f"there are {format_bytes(limit)} ({available.source}). {advice}"
    )


def _capacity_cures(bounds: Bounds, found: Footprint, limit: int) -> Iterator[str]:
    fitting = found.fitting_tokens(limit) // bounds.unit * bounds.unit
    if fitting >= bounds.smallest:
        yield f"microbatch_tokens: {fitting}"


def _slot_cures(
    spec: DecoderSpec, found: Footprint, tokens: int, limit: int
) -> Iterator[str]:
    """Yields the most slots and the largest rank, each of which would fit alone."""
    assert spec.slots is not None

    def is_too_large(number: int, of: int) -> bool:
        adapter_bytes = found.adapter_bytes * number // of
        smaller = dataclasses.replace(found, adapter_bytes=adapter_bytes)
        return smaller.total_bytes(tokens) > limit

    for key, current in (
        ("max_concurrent_jobs", spec.slots.num_slots),
        ("slot_rank", spec.slots.rank),
    ):
        numbers = range(1, current)
        most = bisect.bisect(numbers, False, key=lambda n: is_too_large(n, current))
        if most:
            also = ", and no job of a larger rank" if key == "slot_rank" else ""
            yield f"{key}: {most}{also}"


def _remat_cures(
    config: RunConfig, spec: DecoderSpec, found: Footprint, limit: int
) -> Iterator[str]:
    """Yields the weakest remat, stronger than the run's, that makes the run fit."""
    choices = typing.get_args(Remat)
    stronger = choices[choices.index(config.remat) + 1 :]
    if not stronger:
        return
    tokens, block_tokens = config.limits.capacity, config.block_tokens
    own = estimated_footprint(spec, block_tokens)
    # The error of the estimate with the run's own remat corrects the others.
    factor = found.step_bytes(tokens) / own.step_bytes(tokens)
    for remat in stronger:
        options = dataclasses.replace(spec.options, remat=remat)
        other = estimated_footprint(
            dataclasses.replace(spec, options=options), block_tokens
        )
        corrected = dataclasses.replace(
            other,
            bytes_per_token=factor * other.bytes_per_token,
            transient_bytes_per_token=factor * other.transient_bytes_per_token,
        )
        needed = corrected.total_bytes(tokens)
        if needed <= limit:
            yield f"remat: {remat} (needs about {format_bytes(needed)})"
            return

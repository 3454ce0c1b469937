"""Chooses how quantized weights are stored, where their format leaves a choice."""

import dataclasses

from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.costs.gpus import find_speed
from jaxlora.models.spec import DecoderSpec
from jaxlora.pallas_kernels import WeightOptions, get_backend
from jaxlora.pallas_kernels.device import device_kind
from jaxlora.plan.memory import options
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.memory.device_memory import DeviceMemory, format_bytes
from jaxlora.plan.memory.footprint import num_bytes
from jaxlora.plan.memory.options import Option
from jaxlora.plan.stages import MeshStages


def choose_storage(
    config: RunConfig, spec: DecoderSpec, bounds: Bounds, available: DeviceMemory | None
) -> tuple[DecoderSpec, tuple[Note, ...]]:
    """Returns the decoder with the storage of its quantized weights, and why it is so.

    Where the format leaves a choice, it is the fastest storage if the back end reads
    what that adds, and if memory is estimated to allow the same `remat` and the same
    microbatches as with the smallest one.

    Args:
        config: The run; its mesh is not `auto`.
        spec: Decoder of the run, whose storage may be `auto`.
        bounds: Bounds of the capacity, and the choices of an automatic `remat`.
        available: Memory of each device; None: it is not known.
    """
    base = spec.options.base_format
    if base is None:
        return spec, ()
    first, *faster = base.options.storage_choices()
    smallest = with_options(spec, first)
    if not faster:
        return smallest, ()
    fastest = with_options(spec, faster[-1])
    is_faster, reason = _compare(config, smallest, fastest, bounds, available)
    chosen = faster[-1] if is_faster else first
    names = (field.name for field in dataclasses.fields(chosen))
    settings = ", ".join(
        f"{name}: auto: {getattr(chosen, name)}"
        for name in names
        if getattr(chosen, name) != getattr(base.options, name)
    )
    return with_options(spec, chosen), (Note(f"{settings}, as {reason}"),)


def with_options(spec: DecoderSpec, base: WeightOptions) -> DecoderSpec:
    """Returns the decoder with other options of its quantized weights."""
    assert spec.options.base_format is not None
    base_format = dataclasses.replace(spec.options.base_format, options=base)
    options = dataclasses.replace(spec.options, base_format=base_format)
    return dataclasses.replace(spec, options=options)


def _compare(
    config: RunConfig,
    smallest: DecoderSpec,
    fastest: DecoderSpec,
    bounds: Bounds,
    available: DeviceMemory | None,
) -> tuple[bool, str]:
    """Returns whether the fastest storage is taken, and the reason as a clause."""
    name = smallest.options.implementation
    if not get_backend(name).reads_transpose:
        return False, f"{name} multiplies with the stored weights in both passes"
    if available is None:
        return False, "the device does not report its memory"
    more = num_bytes(fastest.base_shapes()) - num_bytes(smallest.base_shapes())
    best = _best(config, MeshStages.of(config, smallest), bounds, available)
    other = _best(config, MeshStages.of(config, fastest), bounds, available)
    same = f"remat {best.remat} with {best.tokens} tokens"
    if other.fits and (other.remat, other.tokens) == (best.remat, best.tokens):
        return True, f"{format_bytes(more)} more leave enough memory for {same}"
    return False, f"{format_bytes(more)} more would leave too little memory for {same}"


def _best(
    config: RunConfig, stages: MeshStages, bounds: Bounds, available: DeviceMemory
) -> Option:
    speed = find_speed(device_kind())
    return options.fastest(
        options.find_options(config, stages, bounds, available, speed)
    )

"""Chooses whether fp8 weights have a transposed copy for the backward pass."""

import dataclasses

from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.costs.device_speed import find_speed
from jaxlora.memory import options
from jaxlora.memory.bounds import Bounds
from jaxlora.memory.device_memory import DeviceMemory, format_bytes
from jaxlora.memory.footprint import num_bytes
from jaxlora.memory.mesh import MeshStages
from jaxlora.memory.options import Option
from jaxlora.models.spec import DecoderSpec
from jaxlora.pallas_kernels import get_backend
from jaxlora.pallas_kernels.device import device_kind


def choose_copies(
    config: RunConfig, spec: DecoderSpec, bounds: Bounds, available: DeviceMemory | None
) -> tuple[DecoderSpec, tuple[Note, ...]]:
    """Returns the decoder with as many copies of fp8 weights as asked for, and why.

    `fp8_weight_copies: auto` becomes 2 if the back end multiplies with the transpose
    and memory is estimated to allow the same `remat` and the same microbatches with
    two copies as with one.

    Args:
        config: The run; its mesh is not `auto`.
        spec: Decoder of the run, while no weight has a second copy.
        bounds: Bounds of the capacity, and the choices of an automatic `remat`.
        available: Memory of each device; None: it is not known.
    """
    base = spec.options.base_format
    if base is None or not base.options.multiplies_backward:
        return spec, ()
    copies = config.fp8_weight_copies
    if copies != "auto":
        return with_copies(spec, copies), ()
    copies, reason = _choose(config, spec, bounds, available)
    note = Note(f"fp8_weight_copies: auto: {copies}, as {reason}")
    return with_copies(spec, copies), (note,)


def with_copies(spec: DecoderSpec, copies: int) -> DecoderSpec:
    """Returns the decoder with one or two copies of each fp8 weight."""
    assert spec.options.base_format is not None
    base = spec.options.base_format.replace(transposed=copies == 2)
    options = dataclasses.replace(spec.options, base_format=base)
    return dataclasses.replace(spec, options=options)


def _choose(
    config: RunConfig, spec: DecoderSpec, bounds: Bounds, available: DeviceMemory | None
) -> tuple[int, str]:
    """Returns the number of copies, and the reason as a clause."""
    name = spec.options.implementation
    if not get_backend(name).transposes_fp8:
        return 1, f"{name} multiplies with the stored weights in both passes"
    if available is None:
        return 1, "the device does not report its memory"
    twice = with_copies(spec, 2)
    more = format_bytes(num_bytes(twice.base_shapes()) - num_bytes(spec.base_shapes()))
    best = _best(config, MeshStages.of(config, spec), bounds, available)
    other = _best(config, MeshStages.of(config, twice), bounds, available)
    if other.fits and (other.remat, other.tokens) == (best.remat, best.tokens):
        return 2, (
            f"a second one ({more}) leaves enough memory for remat {best.remat} with "
            f"{best.tokens} tokens"
        )
    return 1, (
        f"a second one ({more}) would leave too little memory for remat {best.remat} "
        f"with {best.tokens} tokens"
    )


def _best(
    config: RunConfig, stages: MeshStages, bounds: Bounds, available: DeviceMemory
) -> Option:
    speed = find_speed(device_kind())
    return options.fastest(
        options.find_options(config, stages, bounds, available, speed)
    )

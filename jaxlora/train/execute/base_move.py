"""Moves the frozen base to the devices of another layout, within a process.

A device gets only those parts of weights that it lacks, from another device and not
from the host or the disk. It goes weight by weight, and what a weight leaves is free
before the next one. So devices have memory for one weight more than they hold, unless
someone else keeps the arrays of the base.
"""

from collections.abc import Sequence

import jax
from jax.sharding import Sharding

from jaxlora.models.forward import Base
from jaxlora.train.execute.layout import Layout, one_copy

# The part of an array that a device has, by where it begins and ends on each axis.
_Part = tuple[tuple[int, int], ...]


def move_base(
    params: Base, further: Sequence[Sequence[Base]], layout: Layout
) -> list[list[Base]]:
    """Moves the base; all work on the devices that it was on must be done.

    Args:
        params: Weights of the first replica. They are replaced in place, so that all
            who have the dictionary have the moved weights.
        further: Those of each stage of the further replicas, which are emptied.
        layout: The new layout; its first replica has one stage.

    Returns:
        The weights of each stage of the new further replicas.
    """
    (first,) = layout.stages
    new: list[list[Base]] = [[{} for _ in one.stages] for one in layout.further]
    stages = [first, *(stage for one in layout.further for stage in one.stages)]
    bases = [params, *(base for one in new for base in one)]
    specs = [stage.spec.base_specs() for stage in stages]
    for path in list(params):
        held = [params[path]]
        held += [base.pop(path) for one in further for base in one if path in base]
        moved = []
        for base, stage, spec in zip(bases, stages, specs, strict=True):
            if path in spec:
                where = stage.placement.committed(spec[path])
                base[path] = _placed(held, where)
                moved.append(base[path])
        jax.block_until_ready(moved)
    return new


def _placed(held: Sequence[jax.Array], where: Sharding) -> jax.Array:
    """Returns an array on its devices; they send each other what they lack.

    Args:
        held: The same array on several groups of devices.
        where: Its new placement.
    """
    shape = held[0].shape
    there = {
        (shard.device, _part(shard.index, shape)): shard.data
        for x in held
        for shard in x.addressable_shards
    }
    whole: jax.Array | None = None
    parts = []
    for device, index in where.addressable_devices_indices_map(shape).items():
        assert index is not None
        part = there.get((device, _part(index, shape)))
        if part is None:
            if whole is None:
                whole = one_copy(min(held, key=lambda x: not x.is_fully_replicated))
            is_whole = _part(index, shape) == tuple((0, size) for size in shape)
            part = jax.device_put(whole if is_whole else whole[index], device)
        parts.append(part)
    return jax.make_array_from_single_device_arrays(shape, where, parts)


def _part(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Part:
    return tuple(i.indices(size)[:2] for i, size in zip(index, shape, strict=True))

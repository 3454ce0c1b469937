"""Placement rules for parameters."""

from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec


def fsdp_spec(shape: tuple[int, ...], size: int) -> PartitionSpec:
    """Shards the longest dimension that is divisible by `size`.

    If several dimensions are equally long, the first one is sharded. A parameter
    without a divisible dimension is replicated.

    Args:
        shape: Shape of the parameter.
        size: Number of devices on the `fsdp` axis.
    """
    fits = [dim for dim, length in enumerate(shape) if length % size == 0]
    if size == 1 or not fits:
        return PartitionSpec()
    longest = max(fits, key=lambda dim: shape[dim])
    axes = ("fsdp" if dim == longest else None for dim in range(len(shape)))
    return PartitionSpec(*axes)


def fsdp_placement(
    mesh: jax.sharding.Mesh,
) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """Returns a function from a parameter's path and shape to its sharding."""

    def place(path: str, shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(mesh, fsdp_spec(shape, mesh.shape["fsdp"]))

    return place

"""Where each parameter goes."""

from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec


def fsdp_spec(shape: tuple[int, ...], size: int) -> PartitionSpec:
    """Splits the longest dimension that `size` divides; the first of equals.

    A parameter with no such dimension is kept whole on every device.

    Args:
        shape: Of the parameter.
        size: Devices on the `fsdp` axis.
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
    """A function from a parameter's path and shape to its place on a mesh."""

    def place(path: str, shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(mesh, fsdp_spec(shape, mesh.shape["fsdp"]))

    return place

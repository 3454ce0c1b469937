"""The dimensions along which axes of devices divide each frozen weight."""

from collections.abc import Sequence

from jax.sharding import PartitionSpec

FSDP = "fsdp"
EXPERT = "expert"
TENSOR = "tensor"


def shard_dim(
    path: str, shape: Sequence[int], fsdp: int, *, dims: Sequence[int] = (0, 1)
) -> int | None:
    """Returns the dimension along which a weight is divided; None: it is replicated.

    Vectors, such as norms and biases, are replicated, because they are small. Matrices
    are divided along the first of `dims` that `fsdp` divides. For a linear, K N, that
    is K if possible, because shards of rows lie in the gathered weight one after the
    other, so that gathering them needs no transposition.

    Args:
        path: Path of the weight, for the error.
        shape: Shape of the whole weight.
        fsdp: Number of devices among which it is divided.
        dims: The dimensions that may be divided, the preferred one first. Without any,
            the weight is replicated.

    Raises:
        ValueError: `fsdp` divides none of the dimensions.
    """
    if fsdp == 1 or len(shape) < 2 or not dims:
        return None
    for dim in dims:
        if shape[dim] % fsdp == 0:
            return dim
    sizes = " and ".join(str(shape[dim]) for dim in dims)
    raise ValueError(
        f"{path} of shape {tuple(shape)} cannot be divided among fsdp={fsdp} devices: "
        f"{sizes} must be a multiple of it. Choose an fsdp that divides the model's "
        "sizes."
    )


def weight_spec(
    fsdp: int | None, tensor: int | None = None, expert: int | None = None
) -> PartitionSpec:
    """Returns the placement of a weight.

    If several axes divide one dimension, `fsdp` divides the part of each device along
    the others, so that a gather over `fsdp` gives that part.

    Args:
        fsdp: The dimension that the axis `fsdp` divides; None: it divides none.
        tensor: The dimension that the axis `tensor` divides; None: it divides none.
        expert: The dimension that the axis `expert` divides; None: it divides none.
    """
    pairs = [(EXPERT, expert), (TENSOR, tensor), (FSDP, fsdp)]
    dims = [dim for _, dim in pairs if dim is not None]
    names = [
        tuple(axis for axis, own in pairs if own == dim)
        for dim in range(max(dims, default=-1) + 1)
    ]
    return PartitionSpec(*[(n if len(n) > 1 else n[0]) if n else None for n in names])

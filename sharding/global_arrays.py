"""Arrays on devices of several processes.

Every process runs the same program and holds the same values on its host. A process
can read only those parts of an array that are on its own devices.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jax.typing import DTypeLike

# The device's copy engine reaches this memory directly; see JAX's memory kinds.
_HOST_MEMORY = "pinned_host"
# XLA's allocator of this memory has 64 GiB, unless its settings say otherwise.
_MOST_LOCKED = 40 << 30
_PIECE_BYTES = 1 << 24
# An array that keeps its dtype is copied whole up to the first size; up to the second,
# the host transposes it. Loading a compiled program would take longer than either.
_WHOLE_BYTES, TRANSPOSED_BYTES = 1 << 26, 1 << 22


def put(tree: Any, where: Sharding | None) -> Any:
    """Copies arrays to devices, of which some may belong to other processes.

    `jax.device_put` would gather the values of all processes and compare them, and so
    wait for all devices. Here, each process copies the parts of its own devices.

    Args:
        tree: Arrays of the host, the same on each process; or arrays that are there.
        where: Their placement; None: JAX's default device.
    """
    if where is None or where.is_fully_addressable:
        return jax.device_put(tree, where)

    def one(x: Any) -> jax.Array:
        if isinstance(x, jax.Array):
            return jax.device_put(x, where)
        return jax.make_array_from_callback(x.shape, where, lambda part: x[part])

    return jax.tree.map(one, tree)


def put_converted(
    x: np.ndarray,
    where: Sharding | None,
    dtype: DTypeLike,
    *,
    transpose: bool = False,
) -> jax.Array:
    """Copies an array of the host to devices, in another dtype or transposed.

    Each device converts its own part by itself. So any thread may call this: no
    program runs on several devices, which would have to start in the same order on all.

    Args:
        x: The array, the same on each process.
        where: Placement of the result; None: JAX's default device.
        dtype: Dtype of the result.
        transpose: Whether the result is the transpose of a matrix, or of each matrix
            of several.
    """
    if where is None:
        return _put_part(x, None, jax.default_backend(), dtype, transpose)
    shape = _swapped(x.shape) if transpose else x.shape
    parts = []
    for device, index in where.addressable_devices_indices_map(shape).items():
        assert index is not None
        part = x[_swapped(index) if transpose else index]
        parts.append(_put_part(part, device, device.platform, dtype, transpose))
    return jax.make_array_from_single_device_arrays(shape, where, parts, dtype=dtype)


def _put_part(
    x: np.ndarray,
    device: jax.Device | None,
    platform: str,
    dtype: DTypeLike,
    transpose: bool,
) -> jax.Array:
    most = TRANSPOSED_BYTES if transpose else _WHOLE_BYTES
    if platform != "cpu" and x.dtype == dtype and x.nbytes <= most:
        return jax.device_put(_transposed(x) if transpose else x, device)
    if platform != "cpu":
        return _converted(_put_in_pieces(x, device), dtype, transpose)
    # Here, copying with strides transposes faster than a program of XLA does. There is
    # none to compile, either.
    x = x.astype(dtype, copy=False)
    return jax.device_put(x.swapaxes(-1, -2) if transpose else x, device)


def _swapped[T](axes: tuple[T, ...]) -> tuple[T, ...]:
    """Returns what is given for the axes, as it is after the last two are swapped."""
    *first, row, column = axes
    return *first, column, row


def _transposed(x: np.ndarray) -> np.ndarray:
    """Returns a transposed copy, which is made without the interpreter's lock.

    NumPy would keep the lock for a dtype that is not its own, such as bfloat16.
    """
    same_size = np.dtype(f"u{x.dtype.itemsize}")
    return np.ascontiguousarray(x.view(same_size).swapaxes(-1, -2)).view(x.dtype)


def _put_in_pieces(x: np.ndarray, device: jax.Device | None) -> list[jax.Array]:
    """Copies an array to a device as pieces of its first dimension.

    XLA copies each of them to page-locked memory first. To lock memory takes longer
    than to copy from it, so threads should need no more than a piece each.
    """
    if x.ndim == 0 or x.nbytes <= _PIECE_BYTES:
        return [jax.device_put(x, device)]
    rows = max(1, _PIECE_BYTES * len(x) // x.nbytes)
    return [
        jax.block_until_ready(jax.device_put(x[start : start + rows], device))
        for start in range(0, len(x), rows)
    ]


# The copies are so short that searching for their fastest form does not pay.
@functools.partial(
    jax.jit, static_argnums=(1, 2), compiler_options={"xla_gpu_autotune_level": 0}
)
def _converted(pieces: list[jax.Array], dtype: DTypeLike, transpose: bool) -> jax.Array:
    x = jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0]
    return (x.swapaxes(-1, -2) if transpose else x).astype(dtype)


def everywhere(tree: Any) -> Any:
    """Returns arrays that every process can read whole.

    Those that are on devices of this process only are returned as they are. For the
    others, a copy to all devices is queued, in which all processes must take part.
    """
    return jax.tree.map(_everywhere, tree)


def _everywhere(x: jax.Array) -> jax.Array:
    if x.is_fully_addressable or x.is_fully_replicated:
        return x
    assert isinstance(x.sharding, NamedSharding)
    return _copied(x.sharding.mesh)(x)


def to_host(tree: Any) -> Any:
    """Copies arrays of devices to memory of this host, and waits for it.

    The copies are arrays that no program donates, so training may go on while another
    thread reads them. Of an array that every device holds, one copy is made. The first
    `_MOST_LOCKED` bytes go to page-locked memory, and the others, which take several
    times as long, become NumPy arrays. All processes must take part, as in
    `everywhere`.
    """
    left = _MOST_LOCKED

    def one(x: jax.Array) -> jax.Array | np.ndarray:
        nonlocal left
        x = _everywhere(x)
        if x.is_fully_replicated:
            x = x.addressable_data(0)
        left -= x.nbytes
        if left < 0:
            return np.array(x)
        return jax.device_put(x, x.sharding.with_memory_kind(_HOST_MEMORY))

    return jax.block_until_ready(jax.tree.map(one, tree))


def reserve_host(tree: Any) -> Callable[[], None]:
    """Returns a function that lets the allocator get the memory of `to_host`.

    Locking pages takes about as long as filling them. The allocator keeps them when
    they are free, so the first call of `to_host` need not wait for the system.

    Args:
        tree: Arrays of the shapes, dtypes and placements that `to_host` will get; they
            are not kept.
    """
    places, left = [], _MOST_LOCKED
    for x in jax.tree.leaves(tree):
        left -= x.nbytes
        if left < 0:
            break
        if x.is_fully_replicated or not x.is_fully_addressable:
            device, *_ = x.sharding.addressable_devices
            places.append((x.shape, x.dtype, device))
        else:
            places += [(s.data.shape, x.dtype, s.device) for s in x.addressable_shards]

    def reserve() -> None:
        copies = [
            jax.device_put(
                np.zeros(shape, dtype),
                SingleDeviceSharding(device, memory_kind=_HOST_MEMORY),
            )
            for shape, dtype, device in places
        ]
        jax.block_until_ready(copies)

    return reserve


@functools.lru_cache(maxsize=32)
def _copied(mesh: jax.sharding.Mesh) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))

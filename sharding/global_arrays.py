"""Arrays on devices of several processes.

Every process runs the same program and holds the same values on its host. A process
can read only those parts of an array that are on its own devices.
"""

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding


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


@functools.lru_cache(maxsize=32)
def _copied(mesh: jax.sharding.Mesh) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))

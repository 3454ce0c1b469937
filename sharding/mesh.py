"""Device meshes."""

from collections.abc import Sequence

import jax
import numpy as np

AXES = ("data", "fsdp")


def make_mesh(
    *, data: int = 1, fsdp: int = 1, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """Makes a mesh with the axes `data` and `fsdp`.

    Args:
        data: Number of copies of the base model.
        fsdp: Number of shards of each copy.
        devices: Devices of the mesh; None uses all devices of `jax.devices()`.

    Raises:
        ValueError: The product of the sizes is not the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    if data * fsdp != len(devices):
        raise ValueError(
            f"data={data} times fsdp={fsdp} must be the number of devices, "
            f"{len(devices)}. Change the sizes of the mesh."
        )
    return jax.sharding.Mesh(np.array(devices).reshape(data, fsdp), AXES)

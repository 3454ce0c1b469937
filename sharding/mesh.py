"""Device meshes."""

from collections.abc import Sequence

import jax
import numpy as np

AXES = ("data", "fsdp")


def make_mesh(
    *, data: int = 1, fsdp: int = 1, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """A mesh with the axes `data` (copies of the base) and `fsdp` (parts of it).

    Args:
        data: Copies.
        fsdp: Parts of each copy.
        devices: What to arrange; None: all of this process.

    Raises:
        ValueError: The sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    if data * fsdp != len(devices):
        raise ValueError(
            f"data={data} times fsdp={fsdp} must be the number of devices, "
            f"{len(devices)}."
        )
    return jax.sharding.Mesh(np.array(devices).reshape(data, fsdp), AXES)

"""The device meshes of pipeline stages."""

import logging
from collections.abc import Sequence

import jax
import numpy as np

from jaxlora.sharding.layerwise import use_copy_engines
from jaxlora.sharding.mesh_sizes import MeshSizes

logger = logging.getLogger(__name__)

STAGE_AXES = ("data", "fsdp", "expert", "tensor")


def stage_meshes(
    sizes: MeshSizes, devices: Sequence[jax.Device] | None = None
) -> tuple[jax.sharding.Mesh, ...]:
    """Makes one mesh for each pipeline stage, with the axes `STAGE_AXES`.

    The devices are taken in their order: first along `tensor`, whose devices exchange
    the most, then `expert`, `fsdp`, `data`, and the stages. So those have neighbors. If
    there are more devices than the mesh needs, it takes the first ones. Must be called
    before the first collective; see `layerwise.use_copy_engines`.

    Args:
        sizes: Sizes of the whole mesh.
        devices: Devices to choose from; None: all of `jax.devices()`.

    Raises:
        ValueError: There are fewer devices than the mesh needs.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes.check_fits(len(devices))
    used = devices[: sizes.num_devices]
    if len(used) < len(devices):
        names = ", ".join(map(str, used))
        logger.info(
            "mesh %s: uses %d of %d devices: %s", sizes, len(used), len(devices), names
        )
    if sizes.fsdp > 1:
        use_copy_engines()
    each = sizes.stage, sizes.data, sizes.fsdp, sizes.expert, sizes.tensor
    grid = np.array(used).reshape(each)
    return tuple(jax.sharding.Mesh(stage, STAGE_AXES) for stage in grid)

"""The largest microbatches that fit, where each capacity has its own estimate."""

from collections.abc import Callable

from jaxlora.memory import mesh
from jaxlora.memory.bounds import Bounds
from jaxlora.memory.device_memory import DeviceMemory
from jaxlora.memory.estimate import step_bytes
from jaxlora.memory.mesh import MeshFootprint, MeshStages
from jaxlora.sharding.mesh_sizes import MeshSizes

# Share of the memory that an automatic capacity leaves free on several devices. It is
# the error of the estimate, which is within 5 % of what XLA reports for the stages of
# a pipeline. Weights are read for the chosen mesh before its programs are compiled, so
# it cannot be changed if these need more.
_MARGIN = 0.05


def estimated_room(available: DeviceMemory, sizes: MeshSizes) -> int:
    """Returns the bytes that an automatic capacity may need by estimate.

    Args:
        available: Memory of each device.
        sizes: Sizes of the mesh.
    """
    # On a single device, the compiled step corrects the choice in both directions.
    margin = _MARGIN if sizes.num_devices > 1 else 0.0
    return int((1 - margin) * available.num_bytes)


def estimate_at(
    stages: MeshStages, block_tokens: int, num_tokens: int | None
) -> MeshFootprint:
    """Estimates the memory of a run at one capacity.

    Args:
        stages: Stages of the run.
        block_tokens: Tokens of a block.
        num_tokens: Tokens of a microbatch; None: a lower bound for every capacity, see
            `step_bytes`.
    """
    found = step_bytes(stages.spec, block_tokens, num_tokens)
    return mesh.estimated_footprint(stages, found)


def largest_fitting(
    bounds: Bounds, estimate: Callable[[int | None], MeshFootprint], num_bytes: int
) -> int | None:
    """Returns the largest capacity that is estimated to fit; None if none does.

    Memory does not grow evenly with the capacity, so one may fit although a smaller one
    does not. All that a lower bound allows are tried, from the largest on.

    Args:
        bounds: Bounds of the capacity.
        estimate: Returns the memory of the run at a capacity, or for None a lower bound
            for every capacity.
        num_bytes: Bytes of available memory.
    """
    most = bounds.choose(estimate(None).fitting_tokens(num_bytes))
    if most is None:
        return None
    tried = range(most, bounds.smallest - 1, -bounds.unit)
    fits = (t for t in tried if estimate(t).total_bytes(t) <= num_bytes)
    return next(fits, None)

"""Predicts the time of a window of a run on a mesh."""

from jaxlora.costs.links import Links
from jaxlora.costs.stages import decoder_seconds
from jaxlora.memory.footprint import num_bytes
from jaxlora.memory.mesh import MeshStages
from jaxlora.models.spec import DecoderSpec
from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Schedule,
    StageCost,
    simulate,
)

# Share of a transfer that is not hidden behind the work beside it. Without a prefetch,
# 8 layers of Llama-3.1-8B in 4 shards took 1.065 times as long as whole ones on H200s;
# half of the gathers' 13 ms would be 1.07.
_EXPOSED_SHARE = 0.5


def window_seconds(
    stages: MeshStages,
    lanes: Lanes,
    schedule: Schedule,
    links: Links,
    shapes: tuple[int, ...] = (),
) -> float:
    """Predicts the time of a window from its first pass to its last one.

    The time is in the unit of `decoder_seconds`.

    Args:
        stages: Stages of the run.
        lanes: Lanes of the run.
        schedule: The window.
        links: Rates of the devices, and of the links between them.
        shapes: Shapes of microbatches, in tokens, beside that of the capacity.
    """
    cost = shape_seconds(stages, schedule.limits.capacity, links, shapes)
    n = lanes.num_lanes
    simulation = simulate(schedule, cost, lanes.pipeline, num_lanes=n)
    batches = {(s.owner, s.batch) for m in schedule.microbatches for s in m}
    return simulation.makespan + len(batches) * _step_seconds(stages, links)


def shape_seconds(
    stages: MeshStages, capacity: int, links: Links, shapes: tuple[int, ...] = ()
) -> CostModel:
    """Predicts the time of microbatches of each shape; see `window_seconds`."""
    speed, fsdp = links.speed, stages.sizes.fsdp
    times = decoder_seconds(stages.spec, speed).stages(stages.borders)

    def cost(seconds: float, gather: float) -> AffineCost:
        # A microbatch also takes the time of reading the weights, however small it is.
        of = lambda n: _overlapped((n + speed.weight_tokens) * seconds, gather)
        each = (of(capacity) - of(capacity / 2)) / (capacity / 2)
        base = of(capacity) - capacity * each
        return AffineCost(base=base, per_token=each, per_square=0.0)

    costs = []
    for spec, time in zip(stages.specs, times, strict=True):
        gather = links.seconds(_gathered_bytes(spec, fsdp), fsdp)
        forward, backward = (cost(t, gather) for t in (time.forward, time.backward))
        costs.append(StageCost(forward=forward, backward=backward))
    itemsize = stages.spec.options.dtype.itemsize
    hidden_bytes = capacity * stages.spec.config.hidden_size * itemsize
    return CostModel(
        stages=tuple(costs),
        buckets=(*shapes, capacity),
        communication=speed.transfer_seconds(hidden_bytes),
    )


def _overlapped(compute: float, transfer: float) -> float:
    """Time of a pass whose transfers run beside its computation."""
    return max(compute, transfer) + _EXPOSED_SHARE * min(compute, transfer)


def _gathered_bytes(spec: DecoderSpec, fsdp: int) -> float:
    """Bytes of weights that a device receives in each pass of a stage."""
    return num_bytes(spec.base_shapes()) * (fsdp - 1) / fsdp


def _step_seconds(stages: MeshStages, links: Links) -> float:
    """Time in which a slot's gradients reach all devices that add them.

    A device receives a chunk from each of the others, and then their sums of chunks.
    """
    use = stages.use(0)
    slots = max(num_bytes(spec.adapter_shapes()) for spec in stages.specs)
    assert stages.spec.slots is not None
    slot = slots / stages.spec.slots.num_slots
    received = 2 * slot * (use.num_parts - 1) / use.num_parts
    return links.seconds(received, use.num_parts)

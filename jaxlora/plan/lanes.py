"""The lanes of a run, which follow from its mesh and its jobs."""

from collections.abc import Mapping, Sequence

from jaxlora.config import RunConfig
from jaxlora.config.replicas_config import ReplicaShape
from jaxlora.costs.gpus import find_speed
from jaxlora.costs.stages import decoder_seconds, stage_borders, stage_seconds
from jaxlora.hf.load import base_dtype
from jaxlora.models.config import ModelConfig
from jaxlora.models.options import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.pallas_kernels.device import device_kind
from jaxlora.plan.stages import REPLICA_TICKS
from jaxlora.scheduler import AffineCost, CostModel, Lanes, Pipeline, StageCost
from jaxlora.scheduler.lanes import Replica

_WHOLE = 10_000  # the unit of work: parts of the longest microbatch


def run_lanes(config: RunConfig) -> Lanes:
    """Returns the lanes of a run.

    Args:
        config: The run, with a mesh.
    """
    sizes = config.mesh_sizes
    # A pipeline of one stage has no use for more microbatches in flight.
    in_flight = config.pipeline_microbatches if sizes.stage > 1 else None
    pipeline = Pipeline.one_f_one_b(sizes.stage, in_flight)
    return Lanes(data=sizes.data, fsdp=sizes.fsdp * sizes.expert, pipeline=pipeline)


def replica_lanes(
    shapes: Sequence[ReplicaShape], seconds: Mapping[ReplicaShape, float]
) -> Lanes:
    """Returns the lanes of a run with `replicas`.

    The optimizer step of a job is queued behind the next tick, so a replica that is
    late by less than a tick delays no other. So the job's next batch comes in the tick
    after that.

    Args:
        shapes: The replicas, those with the largest microbatches first.
        seconds: Time of a full microbatch of each shape, in any unit.
    """
    whole = seconds[shapes[0]]
    replicas = [
        Replica(
            capacity=one.tokens,
            work=round(_WHOLE * seconds[one] / whole),
            num_devices=one.tensor,
        )
        for one in shapes
    ]
    pipeline = Pipeline.one_f_one_b(1, REPLICA_TICKS)
    return Lanes(pipeline=pipeline, replicas=tuple(replicas))


def window_cost(
    config: RunConfig, model: ModelConfig, shapes: tuple[int, ...] = ()
) -> CostModel:
    """Returns the cost of microbatches on each stage, padding included.

    The unit is the time that the whole model takes for one token on one device. With
    several stages and one shape, the shape's padding is a part of the fixed time of a
    microbatch, by `padding_share`. While that is `auto`, all microbatches of a shape
    take the same time.

    Args:
        config: The run, with a mesh and a capacity.
        model: Architecture of the model.
        shapes: Shapes of microbatches, in tokens, beside that of the capacity.
    """
    num_stages, capacity = config.mesh_sizes.stage, config.limits.capacity
    speed, buckets = find_speed(device_kind()), (*shapes, capacity)
    # A microbatch also takes the time of reading the weights, however small it is. With
    # one shape, that is a part of the time of each of its tokens.
    base = speed.weight_tokens if shapes else 0.0
    if num_stages == 1:
        half = AffineCost(base=0.5 * base, per_token=0.5, per_square=0.0)
        return CostModel.uniform(1, forward=half, backward=half, buckets=buckets)
    dtype, remat = base_dtype(config.dtype), config.weakest_remat
    options = DecoderOptions(dtype=dtype, remat=remat, max_segment_tokens=1)
    spec = DecoderSpec(config=model, options=options)
    borders = stage_borders(spec, num_stages, speed)
    times = stage_seconds(decoder_seconds(spec, speed), borders)
    whole = sum(time.both for time in times)
    padding = 1.0 if config.padding_share == "auto" else config.padding_share
    is_affine = padding < 1 and not shapes
    if is_affine:
        base, per_token = padding * capacity, 1 - padding
    else:
        per_token = 1.0

    def part(seconds: float) -> AffineCost:
        each = seconds / whole
        return AffineCost(base=base * each, per_token=per_token * each, per_square=0.0)

    stages = [
        StageCost(forward=part(time.forward), backward=part(time.backward))
        for time in times
    ]
    if is_affine:
        return CostModel(stages=tuple(stages))
    return CostModel(stages=tuple(stages), buckets=buckets, padding=padding)

"""The lanes of a run, which follow from its mesh and its jobs."""

from collections.abc import Sequence

from jaxlora.config import RunConfig
from jaxlora.costs.device_speed import find_speed
from jaxlora.costs.stages import decoder_seconds, stage_borders
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.load import base_dtype
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.pallas_kernels.device import device_kind
from jaxlora.scheduler import AffineCost, CostModel, Lanes, Pipeline, StageCost
from jaxlora.scheduler.replicas import Load, Pinning, decide_pinning
from jaxlora.train.plan.job_slots import fixed_shape_cost


def run_lanes(config: RunConfig, loads: Sequence[Load], num_slots: int) -> Pinning:
    """Returns the lanes of a run, and whether its jobs are pinned to replicas.

    Args:
        config: The run, with a mesh and a capacity.
        loads: The work of each job.
        num_slots: Number of jobs that may run at the same time.
    """
    sizes = config.mesh_sizes
    # A pipeline of one stage has no use for more microbatches in flight.
    in_flight = config.pipeline_microbatches if sizes.stage > 1 else None
    pipeline = Pipeline.one_f_one_b(sizes.stage, in_flight)
    lanes = Lanes(data=sizes.data, fsdp=sizes.fsdp, pipeline=pipeline)
    return decide_pinning(loads, lanes, config.limits.capacity, num_slots)


def window_cost(config: RunConfig, model: ModelConfig) -> CostModel:
    """Returns the cost of microbatches that all run in one shape, on each stage.

    The unit is the time that the whole model takes for one token on one device.

    Args:
        config: The run, with a mesh and a capacity.
        model: Architecture of the model.
    """
    num_stages, capacity = config.mesh_sizes.stage, config.limits.capacity
    if num_stages == 1:
        return fixed_shape_cost(capacity)
    dtype, remat = base_dtype(config.dtype), config.weakest_remat
    speed = find_speed(device_kind())
    borders = stage_borders(model, num_stages, speed, dtype=dtype, remat=remat)
    options = DecoderOptions(dtype=dtype, remat=remat, max_segment_tokens=1)
    spec = DecoderSpec(config=model, options=options)
    times = decoder_seconds(spec, speed).stages(borders)
    whole = sum(time.both for time in times)

    def share(seconds: float) -> AffineCost:
        return AffineCost(base=0.0, per_token=seconds / whole, per_square=0.0)

    stages = [
        StageCost(forward=share(time.forward), backward=share(time.backward))
        for time in times
    ]
    return CostModel(stages=tuple(stages), buckets=(capacity,))

"""The lanes of a run, which follow from its mesh and its jobs."""

from collections.abc import Sequence

from jaxlora.config import RunConfig
from jaxlora.scheduler import Lanes, Pipeline
from jaxlora.scheduler.replicas import Dealing, Load, decide_dealing


def run_lanes(
    config: RunConfig, loads: Sequence[Load], *, capacity: int, num_slots: int
) -> Dealing:
    """Returns the lanes of a run, and whether its jobs are dealt to replicas.

    Args:
        config: The run; its mesh is not `auto`.
        loads: The work of each job.
        capacity: Capacity of a microbatch, in tokens.
        num_slots: Number of jobs that may run at the same time.
    """
    sizes = config.mesh_sizes
    # A pipeline of one stage has no use for more microbatches in flight.
    in_flight = config.pipeline_microbatches if sizes.stage > 1 else None
    pipeline = Pipeline.one_f_one_b(sizes.stage, in_flight)
    lanes = Lanes(data=sizes.data, fsdp=sizes.fsdp, pipeline=pipeline)
    return decide_dealing(loads, lanes, capacity, num_slots)

"""Simulates a schedule on a pipeline that runs in 1F1B order."""

import dataclasses

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import ticks_of
from jaxlora.scheduler.types import Pipeline, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """Result of simulating a schedule.

    Times have the unit of the cost model. The arrays have the shape [stages, ticks].

    Attributes:
        makespan: End of the last pass.
        bubble: Fraction of the time of all stages in which nothing runs.
        utilization: Fraction of the makespan in which each stage computes.
        forward_start, forward_end: Start and end of each forward pass.
        backward_start, backward_end: Start and end of each backward pass.
    """

    makespan: float
    bubble: float
    utilization: tuple[float, ...]
    forward_start: np.ndarray
    forward_end: np.ndarray
    backward_start: np.ndarray
    backward_end: np.ndarray


def simulate(
    schedule: Schedule, cost: CostModel, pipeline: Pipeline, *, num_lanes: int = 1
) -> Simulation:
    """Simulates a schedule in the 1F1B order of Megatron-LM.

    A stage starts with the forward passes of its warm-up (`Pipeline.warm_up`), and then
    alternates between one forward and one backward pass. A pass waits for the previous
    pass of its stage, and for the pass of the same tick on the neighboring stage plus
    the communication time. It takes as long as the slowest lane. A no-op has a place in
    the order, but takes no time and waits for no other stage.

    After the tick that completes a batch, each stage takes an optimizer step, as
    `Pipeline.step_delay` says. The step takes no time.

    Args:
        schedule: The schedule. It need not be legal.
        cost: Times of the passes, for the number of stages that `pipeline` has.
        pipeline: The pipeline.
        num_lanes: Number of microbatches in a tick.

    Raises:
        ValueError: The cost model and the pipeline differ in the number of stages, or
            the microbatches do not divide into ticks.

    References:
        Megatron-LM, https://arxiv.org/abs/2104.04473, section 2.2.
    """
    check_stages(cost, pipeline)
    ticks = ticks_of(schedule.microbatches, num_lanes)
    forward, backward = (
        passes.reshape(pipeline.num_stages, -1, num_lanes).max(axis=2)
        for passes in cost.schedule_times(schedule)
    )
    forward_end, backward_end = map(
        np.array,
        _pass_ends(
            forward.tolist(),
            backward.tolist(),
            [any(tick) for tick in ticks],
            pipeline,
            cost.communication,
        ),
    )
    makespan = float(backward_end.max(initial=0.0))
    work = (forward + backward).sum(axis=1)
    return Simulation(
        makespan=makespan,
        bubble=float(1 - work.sum() / (len(work) * makespan)) if makespan else 0.0,
        utilization=tuple((work / makespan).tolist()) if makespan else (),
        forward_start=forward_end - forward,
        forward_end=forward_end,
        backward_start=backward_end - backward,
        backward_end=backward_end,
    )


def _pass_ends(
    forward: list[list[float]],
    backward: list[list[float]],
    is_real: list[bool],
    pipeline: Pipeline,
    communication: float = 0.0,
) -> tuple[list[list[float]], list[list[float]]]:
    """Computes when the forward and backward passes end, by stage and tick.

    Their times are by stage and tick, too. A tick that is not real is a no-op.
    """
    num_stages, num = len(forward), len(is_real)
    clock = [0.0] * num_stages
    warm_up = [pipeline.warm_up(s) for s in range(num_stages)]
    forward_end = [[0.0] * num for _ in range(num_stages)]
    backward_end = [[0.0] * num for _ in range(num_stages)]

    def run(times: list, ends: list, s: int, m: int, neighbor: int) -> None:
        start = clock[s]
        if is_real[m] and 0 <= neighbor < num_stages:
            start = max(start, ends[neighbor][m] + communication)
        clock[s] = ends[s][m] = start + times[s][m]

    # This order visits each pass after all passes that it waits for, because a stage is
    # never ahead of the stage before it.
    for s in range(num_stages):
        for m in range(min(warm_up[s], num)):
            run(forward, forward_end, s, m, s - 1)
    for i in range(num):
        for s in range(num_stages):
            if i + warm_up[s] < num:
                run(forward, forward_end, s, i + warm_up[s], s - 1)
        for s in reversed(range(num_stages)):
            run(backward, backward_end, s, i, s + 1)
    return forward_end, backward_end


def check_stages(cost: CostModel, pipeline: Pipeline) -> None:
    """Checks that the cost model is for the stages of the pipeline.

    Raises:
        ValueError: The numbers of stages differ.
    """
    if cost.num_stages != pipeline.num_stages:
        raise ValueError(
            f"the cost model has {cost.num_stages} stages and the pipeline "
            f"{pipeline.num_stages}. Give one StageCost for each stage."
        )

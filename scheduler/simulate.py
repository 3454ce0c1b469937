"""Simulates a schedule on a pipeline that runs in 1F1B order."""

import dataclasses
import itertools

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.types import Pipeline, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """Result of simulating a schedule.

    Times have the unit of the cost model. The arrays have the shape
    [stages, microbatches].

    Attributes:
        makespan: End of the last pass.
        bubble: Fraction of the time of all stages in which nothing runs.
        utilization: Fraction of the makespan in which each stage computes.
        peak_tokens: For each stage, the most tokens of microbatches whose forward pass
            has started and whose backward pass has not ended.
        num_stale_batches: Global batches that start on some stage before that stage has
            finished the backward of the job's previous batch. They would be trained
            with stale weights.
        forward_start, forward_end: Start and end of each forward pass.
        backward_start, backward_end: Start and end of each backward pass.
    """

    makespan: float
    bubble: float
    utilization: tuple[float, ...]
    peak_tokens: tuple[int, ...]
    num_stale_batches: int
    forward_start: np.ndarray
    forward_end: np.ndarray
    backward_start: np.ndarray
    backward_end: np.ndarray


def simulate(
    schedule: Schedule,
    cost: CostModel,
    pipeline: Pipeline,
) -> Simulation:
    """Simulates a schedule in the 1F1B order of Megatron-LM.

    Stage s starts with S - 1 - s forward passes, and then alternates between one
    forward and one backward pass. A pass waits for the previous pass of its stage, and
    for the pass of the same microbatch on the neighboring stage plus the communication
    time. A no-op has a place in the order, but takes no time and waits for no other
    stage.

    Args:
        schedule: The schedule. It need not be legal: `num_stale_batches` counts the
            batches that start too early.
        cost: Times of the passes, for the number of stages that `pipeline` has.
        pipeline: The pipeline.

    Raises:
        ValueError: The cost model and the pipeline differ in the number of stages.

    References:
        Megatron-LM, https://arxiv.org/abs/2104.04473, section 2.2.
    """
    check_stages(cost, pipeline)
    num_stages = pipeline.num_stages
    warm_up = [num_stages - s - 1 for s in range(num_stages)]
    forward, backward = cost.schedule_times(schedule)
    is_real = [bool(m) for m in schedule.microbatches]
    forward_end, backward_end = _pass_ends(
        forward.tolist(), backward.tolist(), is_real, cost.communication
    )
    forward_end, backward_end = np.array(forward_end), np.array(backward_end)
    makespan = float(backward_end.max(initial=0.0))
    work = (forward + backward).sum(axis=1)
    passes = dict(
        forward_start=forward_end - forward,
        forward_end=forward_end,
        backward_start=backward_end - backward,
        backward_end=backward_end,
    )
    return Simulation(
        makespan=makespan,
        bubble=float(1 - work.sum() / (num_stages * makespan)) if makespan else 0.0,
        utilization=tuple((work / makespan).tolist()) if makespan else (),
        peak_tokens=tuple(_peak_tokens(schedule, cost, n) for n in warm_up),
        num_stale_batches=_num_stale_batches(
            schedule, passes["forward_start"], backward_end
        ),
        **passes,
    )


def _pass_ends(
    forward: list[list[float]],
    backward: list[list[float]],
    is_real: list[bool],
    communication: float = 0.0,
) -> tuple[list[list[float]], list[list[float]]]:
    """Computes when the forward and backward passes end, by stage and microbatch.

    Args:
        forward: Times of forward passes, by stage and microbatch.
        backward: Times of backward passes, by stage and microbatch.
        is_real: Whether each microbatch is not a no-op.
        communication: Time of a transfer between neighboring stages.
    """
    num_stages, num = len(forward), len(is_real)
    clock = [0.0] * num_stages
    warm_up = [num_stages - s - 1 for s in range(num_stages)]
    forward_end = [[0.0] * num for _ in range(num_stages)]
    backward_end = [[0.0] * num for _ in range(num_stages)]
    last = num_stages - 1

    def run_forward(s: int, m: int) -> None:
        start = clock[s]
        if s and is_real[m]:
            start = max(start, forward_end[s - 1][m] + communication)
        clock[s] = forward_end[s][m] = start + forward[s][m]

    def run_backward(s: int, m: int) -> None:
        start = clock[s]
        if s < last and is_real[m]:
            start = max(start, backward_end[s + 1][m] + communication)
        clock[s] = backward_end[s][m] = start + backward[s][m]

    # This order visits each pass after all passes that it waits for, because a stage is
    # never ahead of the stage before it.
    for s in range(num_stages):
        for m in range(min(warm_up[s], num)):
            run_forward(s, m)
    for i in range(num):
        for s in range(num_stages):
            if i + warm_up[s] < num:
                run_forward(s, i + warm_up[s])
        for s in reversed(range(num_stages)):
            run_backward(s, i)
    return forward_end, backward_end


def window_sum(schedule: Schedule, cost: CostModel) -> float:
    """Sums, over all ticks, the time of the slowest microbatch in the pipeline.

    At tick t, stage s runs the forward and backward pass of microbatch t - s. This is
    an estimate of the makespan: it ranks schedules almost as the simulation does, and a
    local change of a schedule only changes a few of its terms.
    """
    forward, backward = cost.schedule_times(schedule)
    return float(slowest_per_tick(forward + backward).sum())


def slowest_per_tick(times: np.ndarray) -> np.ndarray:
    """Returns the time of the slowest stage at each tick, as in `window_sum`.

    Args:
        times: Time of the forward and backward pass together [stages, microbatches].
    """
    num_stages, num = times.shape
    ticks = np.zeros((num_stages, num + num_stages - 1))
    for s in range(num_stages):
        ticks[s, s : s + num] = times[s]
    return ticks.max(axis=0)


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


def _peak_tokens(schedule: Schedule, cost: CostModel, warm_up: int) -> int:
    # The passes of a stage run one after the other, so only their order matters.
    tokens = [cost.size(m, schedule.limits)[0] for m in schedule.microbatches]
    in_flight = peak = sum(tokens[:warm_up])
    for i, done in enumerate(tokens):
        in_flight += tokens[i + warm_up] if i + warm_up < len(tokens) else 0
        peak = max(peak, in_flight)
        in_flight -= done
    return peak


def _num_stale_batches(schedule: Schedule, start: np.ndarray, end: np.ndarray) -> int:
    positions: dict[tuple[int, int], list[int]] = {}
    for i, microbatch in enumerate(schedule.microbatches):
        for key in {(s.job, s.batch) for s in microbatch}:
            positions.setdefault(key, []).append(i)
    num_stale = 0
    for previous, following in itertools.pairwise(sorted(positions)):
        if previous[0] == following[0]:
            stepped = end[:, positions[previous]].max(axis=1)
            started = start[:, positions[following]].min(axis=1)
            # Both are sums of the same times, but in different orders.
            num_stale += bool((started < stepped - 1e-9 * abs(stepped)).any())
    return num_stale

"""What a schedule takes on a pipeline: an event simulation of 1F1B."""

import dataclasses
import itertools

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.types import Pipeline, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """The run of a schedule; arrays are stage by microbatch, times as in the costs.

    Attributes:
        makespan: End of the last pass.
        bubble: Share of the stages' time in which nothing runs.
        utilisation: Share of the makespan in which a stage works, for each stage.
        peak_tokens: Most tokens of microbatches whose forward has begun and whose
            backward has not ended, for each stage.
        num_stale_batches: Global batches that start on some stage before that stage has
            finished the backward of the job's previous batch. They would be trained
            with stale weights.
        forward_start, forward_end, backward_start, backward_end: When passes run.
    """

    makespan: float
    bubble: float
    utilisation: tuple[float, ...]
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
    *,
    max_in_flight: int | None = None,
) -> Simulation:
    """Runs a schedule in 1F1B order, as Megatron-LM's pipeline does.

    Stage s starts with S - 1 - s forwards, then alternates one forward and one
    backward. A pass waits for the stage's previous one, and for the neighbour's pass
    of the same microbatch, plus communication. A no-op takes no time and sends
    nothing: it only stands in the order.

    Args:
        schedule: Any; what it breaks shows as `num_stale_batches`.
        cost: Times of the passes, for as many stages as `pipeline` has.
        pipeline: The stages.
        max_in_flight: Most microbatches between forward and backward on a stage, to
            save memory; 1F1B itself has S - s of them on stage s.

    Raises:
        ValueError: Costs and pipeline differ in stages, or max_in_flight is under 1.
    """
    check_stages(cost, pipeline)
    if max_in_flight is not None and max_in_flight < 1:
        raise ValueError(f"max_in_flight is {max_in_flight}, must be at least 1.")
    num_stages = pipeline.num_stages
    window = max_in_flight or num_stages
    ahead = [min(num_stages - s, window) - 1 for s in range(num_stages)]
    forward, backward = cost.tables(schedule)
    real = [bool(m) for m in schedule.microbatches]
    forward_end, backward_end = pass_ends(
        forward.tolist(), backward.tolist(), real, ahead, cost.communication
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
        utilisation=tuple((work / makespan).tolist()) if makespan else (),
        peak_tokens=tuple(_peak_tokens(schedule, cost, n) for n in ahead),
        num_stale_batches=_stale(schedule, passes["forward_start"], backward_end),
        **passes,
    )


def pass_ends(
    forward: list[list[float]],
    backward: list[list[float]],
    real: list[bool],
    ahead: list[int],
    communication: float = 0.0,
) -> tuple[list[list[float]], list[list[float]]]:
    """Ends of forward and of backward passes, stage by microbatch.

    Args:
        forward: Times of forward passes, stage by microbatch; `backward` likewise.
        backward: Times of backward passes.
        real: Whether a microbatch is none of the no-ops.
        ahead: Forwards that a stage starts with before it alternates.
        communication: Time between neighbours.
    """
    num_stages, num = len(forward), len(real)
    clock = [0.0] * num_stages
    forward_end = [[0.0] * num for _ in range(num_stages)]
    backward_end = [[0.0] * num for _ in range(num_stages)]
    last = num_stages - 1

    def run_forward(s: int, m: int) -> None:
        start = clock[s]
        if s and real[m]:
            start = max(start, forward_end[s - 1][m] + communication)
        clock[s] = forward_end[s][m] = start + forward[s][m]

    def run_backward(s: int, m: int) -> None:
        start = clock[s]
        if s < last and real[m]:
            start = max(start, backward_end[s + 1][m] + communication)
        clock[s] = backward_end[s][m] = start + backward[s][m]

    # An order of all passes in which each stands after those that it waits for; a
    # stage is never further ahead than the one before it.
    for s in range(num_stages):
        for m in range(min(ahead[s], num)):
            run_forward(s, m)
    for i in range(num):
        for s in range(num_stages):
            if i + ahead[s] < num:
                run_forward(s, i + ahead[s])
        for s in reversed(range(num_stages)):
            run_backward(s, i)
    return forward_end, backward_end


def window_sum(schedule: Schedule, cost: CostModel) -> float:
    """Sum over time of the dearest of the S microbatches that are in the pipeline.

    Time t has microbatch t - s on stage s, forward and backward. Orders schedules
    nearly as the simulated makespan does, and a local change of a schedule changes it
    only locally.
    """
    forward, backward = cost.tables(schedule)
    return float(dearest(forward + backward).sum())


def lock_step_time(schedule: Schedule, cost: CostModel) -> float:
    """What a schedule takes where all stages tick together, as in one SPMD program.

    In a tick, stage s runs one forward and one backward, of the microbatch that has
    come to it from above and from below; the dearest stage decides how long it takes.
    That is the executor of `Pipeline.fused_tick`.
    """
    forward, backward = cost.tables(schedule)
    num_stages, num = forward.shape
    if not num:
        return 0.0
    at = np.zeros((num_stages, num + 2 * (num_stages - 1)))
    for s in range(num_stages):
        at[s, s : s + num] = forward[s]
        up = 2 * (num_stages - 1) - s
        at[s, up : up + num] += backward[s]
    ticks = at.max(axis=0)
    return float(ticks.sum() + cost.communication * (len(ticks) - 1))


def dearest(both: np.ndarray) -> np.ndarray:
    """Time of the dearest pass pair at each moment, from times stage by microbatch."""
    num_stages, num = both.shape
    at = np.zeros((num_stages, num + num_stages - 1))
    for s in range(num_stages):
        at[s, s : s + num] = both[s]
    return at.max(axis=0)


def check_stages(cost: CostModel, pipeline: Pipeline) -> None:
    """Raises ValueError unless both have the same number of stages."""
    if cost.num_stages != pipeline.num_stages:
        raise ValueError(
            f"the cost model has {cost.num_stages} stages and the pipeline "
            f"{pipeline.num_stages}: give one StageCost a stage."
        )


def _peak_tokens(schedule: Schedule, cost: CostModel, ahead: int) -> int:
    # The passes of a stage follow one another, so the order alone decides.
    tokens = [cost.size(m, schedule.limits)[0] for m in schedule.microbatches]
    held = peak = sum(tokens[:ahead])
    for i, done in enumerate(tokens):
        held += tokens[i + ahead] if i + ahead < len(tokens) else 0
        peak = max(peak, held)
        held -= done
    return peak


def _stale(schedule: Schedule, start: np.ndarray, end: np.ndarray) -> int:
    microbatches_of: dict[tuple[int, int], list[int]] = {}
    for i, microbatch in enumerate(schedule.microbatches):
        for key in {(s.job, s.batch) for s in microbatch}:
            microbatches_of.setdefault(key, []).append(i)
    keys = sorted(microbatches_of)
    stale = 0
    for before, after in itertools.pairwise(keys):
        if before[0] == after[0]:
            stepped = end[:, microbatches_of[before]].max(axis=1)
            begun = start[:, microbatches_of[after]].min(axis=1)
            # Ends and starts are sums of the same times in different orders.
            stale += bool((begun < stepped - 1e-9 * abs(stepped)).any())
    return stale

"""Simulates many variants of a schedule at once."""

import dataclasses

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.types import Pipeline


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the ticks of several schedules; the arrays have the shape [ticks, K].

    Attributes:
        tokens: Tokens of each tick, padded to its bucket; 0 for a no-op.
        squares: Sum of the squared sample lengths of each tick.
    """

    tokens: np.ndarray
    squares: np.ndarray


def makespans(sizes: Sizes, cost: CostModel, pipeline: Pipeline) -> np.ndarray:
    """Returns the makespans [K] of `simulate` for K schedules.

    Every step of the simulation is done for all schedules together, which takes a few
    microseconds a schedule for schedules of dozens of ticks.

    Args:
        sizes: Sizes of the ticks of each schedule, which have the same length.
        cost: Times of the passes.
        pipeline: The pipeline.
    """
    tokens, squares = sizes.tokens, sizes.squares
    num, num_schedules = tokens.shape
    is_real = tokens > 0
    # A no-op does not wait for other stages.
    wait = np.where(is_real, cost.communication, -np.inf)
    forward, backward = cost.times(tokens, squares, is_real)
    stages, last = range(cost.num_stages), cost.num_stages - 1
    warm_up = [pipeline.warm_up(s) for s in stages]
    clock = list(np.zeros((cost.num_stages, num_schedules)))
    # The ends of the passes replace their times.
    def run(passes: np.ndarray, s: int, m: int, previous: int | None) -> None:
        if previous is not None:
            start = passes[previous, m] + wait[m]
            np.maximum(start, clock[s], out=start)
            passes[s, m] += start
        else:
            passes[s, m] += clock[s]
        clock[s] = passes[s, m]

    for s in stages:
        for m in range(min(warm_up[s], num)):
            run(forward, s, m, s - 1 if s else None)
    for i in range(num):
        for s in stages:
            if i + warm_up[s] < num:
                run(forward, s, i + warm_up[s], s - 1 if s else None)
        for s in reversed(stages):
            run(backward, s, i, s + 1 if s < last else None)
    return backward[:, -1].max(axis=0) if num else np.zeros(num_schedules)

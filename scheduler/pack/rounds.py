"""Runs small batches in rounds: those that take about equally long together.

If every batch fits in a microbatch, most of a pipeline is idle in any order, and the
next batch of a job follows right after its last one. A round has a batch of some jobs,
each in a microbatch of its own, and takes about as long as the longest of them alone.
So the time is shortest if long batches share rounds, for which jobs with short ones
wait.
"""

import itertools
from collections.abc import Sequence

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Sample,
    batches_by_job,
    in_order,
    padded_tokens,
)

# States that the search keeps of those in which as many batches are done.
_WIDTH = 32
# Batches for which it takes about a second.
_MAX_BATCHES = 1024

# Number of batches that are done, by job.
_State = tuple[int, ...]


def pack(
    samples: Sequence[Sample], limits: Limits, lanes: Lanes, cost: CostModel
) -> list[list[Microbatch]] | None:
    """Packs each batch into a microbatch, and these into rounds of `distance` ticks.

    Args:
        samples: All global batches of all jobs.
        limits: Capacity and block size.
        lanes: The lanes, and their pipeline.
        cost: Times of a microbatch on one lane.

    Returns:
        The microbatches of each tick; None if a batch does not fit in a microbatch, a
        round has no place for a batch of each job, or there are too many batches.
    """
    n, distance = lanes.num_lanes, lanes.pipeline.distance
    jobs = [batches for _, batches in sorted(batches_by_job(samples).items())]
    whole = [[in_order(batch) for batch in batches] for batches in jobs]
    is_small = all(
        padded_tokens(batch, limits) <= limits.capacity
        and len(batch) <= limits.most_samples
        for batches in whole
        for batch in batches
    )
    num_batches = sum(map(len, whole))
    if not is_small or num_batches > _MAX_BATCHES or not 1 < len(jobs) <= n * distance:
        return None
    step = cost.stages[0].forward + cost.stages[0].backward
    times = [[step(*cost.size(b, limits)) for b in batches] for batches in whole]
    done, ticks = [0] * len(whole), []
    for chosen in _rounds(times):
        round_ticks: list[list[Microbatch]] = [[] for _ in range(distance)]
        for job in chosen:
            round_ticks[job // n].append(whole[job][done[job]])
            done[job] += 1
        ticks += round_ticks
    while not ticks[-1]:
        ticks.pop()
    return ticks


def _rounds(times: Sequence[Sequence[float]]) -> list[list[int]]:
    """Returns the jobs of each round, so that the sum of the rounds' times is small.

    The time of a round is that of its longest batch. Another batch that takes no longer
    never costs anything, so a round is determined by its time: that of the next batch
    of some job. The search goes on from the best states in which as many batches are
    done, where half of the mean and all of the longest job's remaining time are added.

    Args:
        times: Times of the batches of each job.

    References:
        Brucker et al., Scheduling a batching machine, Journal of Scheduling 1, 1998.
    """
    left = [
        [*itertools.accumulate(reversed(of_job), initial=0.0)][::-1] for of_job in times
    ]
    end = tuple(map(len, times))
    # By the number of batches done: the time until a state, and the state before it.
    layers: list[dict[_State, tuple[float, _State]]] = [{} for _ in range(sum(end) + 1)]
    layers[0][(0,) * len(times)] = 0.0, ()

    def estimate(found: tuple[_State, tuple[float, _State]]) -> float:
        state, (time, _) = found
        rest = [left[job][number] for job, number in enumerate(state)]
        return time + max(rest) + 0.5 * sum(rest) / len(rest)

    for layer in layers[:-1]:
        for state, (time, _) in sorted(layer.items(), key=estimate)[:_WIDTH]:
            following = [
                of_job[number] if number < len(of_job) else None
                for of_job, number in zip(times, state, strict=True)
            ]
            for longest in {t for t in following if t is not None}:
                after = tuple(
                    number + (t is not None and t <= longest)
                    for number, t in zip(state, following, strict=True)
                )
                known = layers[sum(after)]
                if after not in known or time + longest < known[after][0]:
                    known[after] = time + longest, state
    rounds, state = [], end
    while any(state):
        before = layers[sum(state)][state][1]
        rounds.append([j for j, number in enumerate(state) if number > before[j]])
        state = before
    return rounds[::-1]

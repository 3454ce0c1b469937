"""Runs small batches in rounds: batches that take about equally long run together.

If every batch fits in a microbatch, most of a pipeline is idle in any order. In a
round, some of the jobs each run one batch, in a microbatch of its own, and the round
takes about as long as the longest of them alone. So the time is shortest if long
batches share rounds, and jobs with short batches wait for that.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes
from jaxlora.scheduler.pack.segment import Segment
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pipeline,
    Sample,
    batches_by_job,
    in_order,
    padded_tokens,
)

# States that the search keeps for each number of batches done.
_WIDTH = 32
# The search takes about a second for this number of batches.
_MAX_BATCHES = 1024

# Rounds whose ticks are placed by simulation, at most, which takes a few seconds for
# eight jobs on eight stages; and plans that are simulated together, at most.
_MAX_PLACED = 32
_REACH = 3  # ticks that a job moves at once
_MAX_TOGETHER = 128

# Number of batches that are done, by job.
_State = tuple[int, ...]


def pack(
    samples: Sequence[Sample], limits: Limits, lanes: Lanes, cost: CostModel
) -> list[list[Microbatch]] | None:
    """Packs each batch into a microbatch, and these into rounds of `distance` ticks.

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
    chosen = _rounds(times)
    slots = np.tile(np.arange(len(whole)) // n, (len(chosen), 1))
    if n == 1 < lanes.pipeline.num_stages and len(chosen) <= _MAX_PLACED:
        slots = _placed(chosen, whole, limits, lanes.pipeline, cost)
    done = [0] * len(whole)
    ticks: list[list[Microbatch]] = [[] for _ in range(distance * len(chosen))]
    for number, jobs_of_round in enumerate(chosen):
        for job in jobs_of_round:
            tick = ticks[number * distance + slots[number, job]]
            tick.append(whole[job][done[job]])
            done[job] += 1
    while not ticks[-1]:
        ticks.pop()
    return ticks


def _placed(
    chosen: Sequence[Sequence[int]],
    whole: Sequence[Sequence[Microbatch]],
    limits: Limits,
    pipeline: Pipeline,
    cost: CostModel,
) -> np.ndarray:
    """Returns the tick of each round in which each job runs [rounds, jobs].

    Two ticks change places in one round, in three, or from one round on, while that
    shortens the makespan. A job may run earlier in a round than in its last one only if
    it has waited in between.
    """
    num, distance, num_jobs = len(chosen), pipeline.distance, len(whole)
    sizes = np.zeros((2, num, num_jobs))
    for job, batches in enumerate(whole):
        rounds = [number for number, jobs in enumerate(chosen) if job in jobs]
        for number, batch in zip(rounds, batches, strict=True):
            sizes[0, number, job] = padded_tokens(batch, limits)
            sizes[1, number, job] = sum(s.num_tokens**2 for s in batch)
    is_in, num_ticks = sizes[0] > 0, num * distance
    segment = Segment(np.zeros((2, num_ticks)), 0, num_ticks, cost, pipeline)
    starts = distance * np.arange(num)[:, None]

    def best_of(tried: np.ndarray) -> tuple[float, np.ndarray]:
        times = []
        for some in np.array_split(tried, -(-len(tried) // _MAX_TOGETHER)):
            ticks = np.zeros((2, num_ticks, len(some)))
            for variant, slots in enumerate(some):
                ticks[:, (starts + slots)[is_in], variant] = sizes[:, is_in]
            times.append(segment.makespans(ticks))
        every = np.concatenate(times)
        return float(every.min()), tried[int(every.argmin())]

    orders = itertools.permutations(range(num_jobs))
    some = np.array([*itertools.islice(orders, _MAX_TOGETHER)])
    now, slots = best_of(np.repeat(some[:, None], num, axis=1))
    while True:
        tried = [
            np.where(rows & (slots == a), b, np.where(rows & (slots == b), a, slots))
            for a, b in itertools.combinations(range(distance), 2)
            if b - a <= _REACH
            for first in range(num)
            for last in {first + 1, first + 3, num}
            for rows in [((starts >= first * distance) & (starts < last * distance))]
        ]
        ticks = starts + np.array(tried)
        is_legal = np.ones(len(tried), bool)
        for job in range(num_jobs):
            gaps = np.diff(ticks[:, is_in[:, job], job], axis=1)
            is_legal &= (gaps >= distance).all(axis=1)
        if not is_legal.any():
            return slots
        time, found = best_of(np.array(tried)[is_legal])
        if time >= now * (1 - 1e-6):
            return slots
        now, slots = time, found


def _rounds(times: Sequence[Sequence[float]]) -> list[list[int]]:
    """Returns the jobs of each round, so that the sum of the rounds' times is small.

    The time of a round is that of its longest batch. Another batch that takes no longer
    never costs anything, so a round is determined by its time: that of the next batch
    of some job. For each number of batches done, the search goes on from the best
    states, ranked by their time plus the longest job's remaining time and half of the
    mean remaining time.

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

"""Decides whether replicas share all jobs, and which replica a job runs on."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jaxlora.scheduler.lanes import Lanes
from jaxlora.scheduler.streams.lane_fill import ticks_per_batch

# Pinning exchanges nothing between replicas and keeps each adapter on one of them, so
# it is chosen even if it is predicted to take slightly longer.
_PINNING_TOLERANCE = 1.02


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The work that a job has left.

    Attributes:
        num_batches: Number of global batches left.
        batch_tokens: Mean number of tokens of a batch.
    """

    num_batches: int
    batch_tokens: float

    @property
    def tokens(self) -> float:
        """Number of tokens left."""
        return self.num_batches * self.batch_tokens


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pinning:
    """Whether jobs are pinned to replicas.

    Attributes:
        lanes: The lanes, with `slots_per_replica` set if jobs are pinned.
        reason: The reason for the decision, in one line.
    """

    lanes: Lanes
    reason: str


def decide_pinning(
    loads: Sequence[Load], lanes: Lanes, capacity: int, num_slots: int
) -> Pinning:
    """Decides whether each job runs on one replica or all replicas share all jobs.

    Jobs are pinned if there is at least one for each replica and the predicted number
    of ticks is about the same or smaller.

    Args:
        loads: The work of each job.
        lanes: The lanes. Whether they are pinned is ignored.
        capacity: Maximum number of tokens in a microbatch.
        num_slots: Number of jobs that may run at the same time. If jobs are pinned, it
            is rounded up to a multiple of the number of replicas.
    """
    shared = dataclasses.replace(lanes, slots_per_replica=None)
    if lanes.data == 1:
        return Pinning(lanes=shared, reason="there is one replica")
    num_concurrent = min(len(loads), num_slots)
    if num_concurrent < lanes.data:
        return Pinning(
            lanes=shared,
            reason=f"replicas share all jobs: at most {num_concurrent} jobs run at "
            f"the same time on {lanes.data} replicas",
        )
    slots_per_replica = -(-num_slots // lanes.data)
    ticks_shared = estimate_ticks(loads, shared, capacity, num_slots)
    ticks_pinned = max(
        estimate_ticks(part, lanes.one_replica(), capacity, slots_per_replica)
        for part in _deal(loads, lanes.data)
    )
    figures = f"{ticks_pinned:.0f} ticks if pinned, {ticks_shared:.0f} if shared"
    if ticks_pinned > _PINNING_TOLERANCE * ticks_shared:
        return Pinning(lanes=shared, reason=f"replicas share all jobs: {figures}")
    pinned = dataclasses.replace(lanes, slots_per_replica=slots_per_replica)
    return Pinning(lanes=pinned, reason=f"each job runs on one replica: {figures}")


def estimate_ticks(
    loads: Sequence[Load], lanes: Lanes, capacity: int, num_slots: int
) -> float:
    """Estimates the ticks that jobs take together on shared lanes.

    This is the largest of three lower bounds: the ticks that hold all tokens, the ticks
    of the job that needs the most, and the ticks of all jobs divided by the slots.

    Args:
        loads: The work of each job.
        lanes: The lanes.
        capacity: Maximum number of tokens in a microbatch.
        num_slots: Number of jobs that may run at the same time.
    """
    tick_tokens = lanes.num_lanes * capacity
    distance = lanes.pipeline.distance
    chains = [
        load.num_batches * ticks_per_batch(load.batch_tokens, tick_tokens, distance)
        for load in loads
    ]
    tokens = sum(load.tokens for load in loads)
    return max(tokens / tick_tokens, sum(chains) / num_slots, *chains, 0.0)


def _deal(loads: Iterable[Load], num_replicas: int) -> list[list[Load]]:
    """Pins jobs to replicas, largest first, each to the replica with the least work.

    References:
        Graham, Bounds on Multiprocessing Timing Anomalies, 1969.
    """
    parts: list[list[Load]] = [[] for _ in range(num_replicas)]
    totals = [0.0] * num_replicas
    for load in sorted(loads, key=lambda load: -load.tokens):
        replica = totals.index(min(totals))
        parts[replica].append(load)
        totals[replica] += load.tokens
    return parts


def choose_slots(
    tokens: Mapping[int, float],
    running: Mapping[int, float],
    lanes: Lanes,
) -> dict[int, int]:
    """Chooses slots for new jobs so that replicas have about the same work left.

    The largest job comes first. It gets the lowest free slot of the replica with the
    least work among those with a free slot.

    Args:
        tokens: Tokens that each new job has left, by number of the job.
        running: Tokens that the running jobs have left, by slot. They keep their slots.
        lanes: The lanes, which are pinned.

    Returns:
        The slot of each new job.

    Raises:
        ValueError: There are more jobs than slots.
    """
    per_replica = lanes.slots_per_replica or 0
    free = [
        [
            slot
            for slot in range(first * per_replica, (first + 1) * per_replica)
            if slot not in running
        ]
        for first in range(lanes.data)
    ]
    if len(tokens) > sum(map(len, free)):
        raise ValueError(
            f"the jobs do not fit: {len(tokens)} wait, and free slots: "
            f"{sum(map(len, free))} of {lanes.data * per_replica}."
        )
    work = [0.0] * lanes.data
    for slot, left in running.items():
        work[lanes.replica(slot)] += left
    out: dict[int, int] = {}
    for job in sorted(tokens, key=lambda job: (-tokens[job], job)):
        with_room = (r for r in range(lanes.data) if free[r])
        replica = min(with_room, key=lambda r: (work[r], r))
        out[job] = free[replica].pop(0)
        work[replica] += tokens[job]
    return out
